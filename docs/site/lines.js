// A link to lines of a source file, #L20 or #L20-L55 as on GitHub, marks them and brings them into view.
function markLines() {
  document.querySelectorAll(".source .marked").forEach((line) => line.classList.remove("marked"));
  const range = /^#L(\d+)(?:-L(\d+))?$/.exec(location.hash);
  if (!range) return;
  const first = Number(range[1]);
  const last = Number(range[2] ?? first);
  for (let line = first; line <= last; line++) document.getElementById(`L${line}`)?.classList.add("marked");
  document.getElementById(`L${first}`)?.scrollIntoView();
}
addEventListener("hashchange", markLines);
markLines();

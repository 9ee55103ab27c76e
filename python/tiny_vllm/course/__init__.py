"""The experiments of the course: `python -m tiny_vllm.course 6` runs the one of chapter 6.

Each is a module `chapter_NN` with

- a docstring whose first line is the chapter's title,
- `run(device)`, which prints what the chapter shows, and returns the numbers of its figure,
- `draw(data, figure)`, which draws these numbers with matplotlib.
"""

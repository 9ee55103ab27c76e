"""Lets a build folder on PYTHONPATH win over an editable install of tiny_vllm.

An editable install puts a finder in front of sys.path. Without this file the installed module would be
imported, and a developer would test the wrong binary.
"""

import sys

sys.meta_path[:] = [
    finder
    for finder in sys.meta_path
    if not any(str(name).startswith("tiny_vllm") for name in getattr(finder, "known_source_files", ()))
]

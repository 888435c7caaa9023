"""The list in mutants.py fits the code as it is, so that it can be run at any time."""

import ast

from mutants import FAULTS, ROOT


def test_every_fault_is_one_place_in_the_code_and_leaves_it_python():
    names = [(file, what) for file, what, _, _ in FAULTS]
    assert len(names) == len(set(names)) >= 30
    for file, what, line, wrong in FAULTS:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert text.count(line) == 1, f"{file}: {what}"
        changed = ast.parse(text.replace(line, wrong))
        assert ast.dump(changed) != ast.dump(ast.parse(text)), f"{file}: {what}"

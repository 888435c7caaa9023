"""The list in mutants.py fits the code as it is, so that it can be run at any time."""

import ast

from mutants import FAULTS, ROOT


def test_every_fault_is_one_place_in_the_code_and_leaves_it_python():
    names = [(file, what) for file, what, _, _ in FAULTS]
    assert len(names) == len(set(names)) >= 30
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file, *_ in FAULTS}
    before = {file: ast.dump(ast.parse(text)) for file, text in texts.items()}
    for file, what, line, wrong in FAULTS:
        assert texts[file].count(line) == 1, f"{file}: {what}"
        changed = texts[file].replace(line, wrong)
        assert ast.dump(ast.parse(changed)) != before[file], f"{file}: {what}"

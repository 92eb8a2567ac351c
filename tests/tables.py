"""Tables of cases that are one test each: thousands of rows cost little more than what they compute."""

import functools
import inspect

import pytest


def cases(names, rows, ids=None):
    """Used like `pytest.mark.parametrize`: the test is called for every row, and what fails names its rows.

    For cheap cases that fail together. The others go on when one fails, each has a `tmp_path`, a `monkeypatch` and a
    `capsys` of its own, and several of these decorators multiply.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = list(rows)
    table = [dict(zip(names, _values(row, len(names)), strict=True)) for row in rows]
    labels = [_label(row, len(names), ids, index) for index, row in enumerate(rows)]

    def decorate(test):
        @functools.wraps(test)
        def every_case(*args, **fixtures):
            failed, skipped = [], []
            for index, (label, row) in enumerate(zip(labels, table, strict=True)):
                try:
                    _call(test, index, args, fixtures, row)
                except (Exception, pytest.fail.Exception) as error:
                    failed.append((label, error))
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
            if failed:
                first = failed[0][1]
                first.add_note(f"{len(failed)} of {len(table)} cases fail: " + "; ".join(label for label, _ in failed))
                raise first
            if len(skipped) == len(table):
                raise skipped[0]

        signature = inspect.signature(test)
        assert table, f"{test.__name__} has no cases."
        assert not any(getattr(row, "marks", ()) for row in rows), f"A row of {test.__name__} has marks of its own."
        assert set(names) <= set(signature.parameters), f"{test.__name__} does not take {names}."
        own = [parameter for name, parameter in signature.parameters.items() if name not in names]
        every_case.__signature__ = signature.replace(parameters=own)
        for mark in ("hypothesis", "is_hypothesis_test"):  # those of the test are not of the table
            vars(every_case).pop(mark, None)
        return every_case

    return decorate


def _values(row, count):
    values = row.values if hasattr(row, "marks") else row  # of a pytest.param, or as they are
    return values if count > 1 or hasattr(row, "marks") else [values]


def _label(row, count, ids, index):
    if callable(ids):
        return " ".join(str(ids(value)) for value in _values(row, count))
    label = [*ids][index] if ids is not None else getattr(row, "id", None)
    return str(label) if label is not None else " ".join(filter(None, map(_text, _values(row, count)))) or str(index)


def _text(value):
    """A value in a label; a function by its name, since its address changes from run to run."""
    if inspect.isfunction(value):
        return "" if value.__name__ == "<lambda>" else value.__name__
    return f"{value!r}"[:100]


def _call(test, index, args, fixtures, row):
    """One case, with fixtures that know nothing of the others."""
    fixtures = dict(fixtures)
    if "tmp_path" in fixtures:
        fixtures["tmp_path"] = fixtures["tmp_path"] / str(index)
        fixtures["tmp_path"].mkdir()
    if "capsys" in fixtures:
        fixtures["capsys"].readouterr()
    if "monkeypatch" in fixtures:
        with pytest.MonkeyPatch.context() as fixtures["monkeypatch"]:
            return test(*args, **fixtures, **row)
    return test(*args, **fixtures, **row)


def rows(names, values, ids=None):
    """`pytest.mark.parametrize` with the text of each row as its id: `-k` finds it, and each row fails by itself."""
    values = list(values)
    names = names if isinstance(names, str) else ",".join(names)  # of a single name, rows are values
    return pytest.mark.parametrize(names, values, ids=ids or [_id(row)[:100] for row in values])


def _id(value):
    """The same text in each process, so without addresses of objects."""
    if isinstance(value, dict):
        return " ".join(f"{_id(key)}={_id(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        items = value if isinstance(value, (list, tuple)) else sorted(value)  # the order of sets differs between processes
        return " ".join(map(_id, items)) or "[]"
    return getattr(value, "__name__", type(value).__name__) if " at 0x" in repr(value) else str(value)

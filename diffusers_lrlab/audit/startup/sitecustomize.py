"""Loads the recorder into every Python process of an audited program, whichever launcher starts it.

Python imports `sitecustomize` at startup. This one removes its folder from `sys.path`, and then imports the environment's
own. It must not import `diffusers_lrlab`, which registers schedules and need not be installed here.
"""

import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start_recorder() -> None:
    folder = os.path.join(os.path.dirname(_HERE), "recorder")
    path = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location("_lrlab_recorder", path, submodule_search_locations=[folder])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.record_when_torch_is_imported(os.environ["LRLAB_AUDIT"])


def _import_own_sitecustomize() -> None:
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
    sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = sys.modules.get("sitecustomize", _this)


_this = sys.modules[__name__]
if os.environ.get("LRLAB_AUDIT"):
    _start_recorder()
_import_own_sitecustomize()

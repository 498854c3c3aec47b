"""The compiler is imported beside the making of the process group, when blocks are compiled."""

import subprocess
import sys

import pytest

from ndtrain.recipe.schema import Recipe
from ndtrain.train.warm_up import may_compile

CODE = """
import sys
from ndtrain.train.warm_up import WarmUp
WarmUp(False).finish()
before = "torch._inductor.compile_fx" in sys.modules
WarmUp(True).finish()
print(before, "torch._inductor.compile_fx" in sys.modules)
"""


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"torch_compile": True, "device": "cpu"}, True),
        ({"torch_compile": False}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_only_a_run_that_compiles_needs_the_compiler(keys: dict[str, object], wanted: bool) -> None:
    model = {"model_type": "llama"}
    assert may_compile(Recipe(model_config=model, learning_rate=1e-3, **keys)) == wanted


@pytest.mark.slow
def test_it_is_there_when_the_warm_up_is_over() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]

"""What each entrance imports, seen in ``sys.modules``, and the strategy's name in Lightning."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import lightning_dcp
import lightning_dcp.data

HEAVY = ["lightning", "matplotlib", "megatron", "pandas", "pyarrow", "torch", "transformers"]


def run(program: str, cwd: Path) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, env=os.environ, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


PLAN = (
    "plan --length_file lengths.csv --num_ranks 4 --max_seqlen_per_dp_cp_rank 4096 "
    "--global_batch_size 4 --model 8b"
)


@pytest.mark.parametrize(
    "entrance",
    [
        "import lightning_dcp; dir(lightning_dcp); lightning_dcp.planning.plan_global_batch",
        "from lightning_dcp import LRSchedule, ModelConfig, MoEConfig, OptimizerSettings",
        "from lightning_dcp.planning import plan_global_batch",
        "import lightning_dcp.config.parallel, lightning_dcp.config.requirements",
        "from lightning_dcp.data import read_length_file, load_tokenizer",
        "from lightning_dcp.cli import main; main(['--help'])",
        f"from lightning_dcp.cli import main; main('{PLAN}'.split())",
    ],
)
def test_an_entrance_is_light(entrance, tmp_path):
    (tmp_path / "lengths.csv").write_text("length,count\n1000,6\n9000,2\n")
    seen = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"
    out, _ = run(f"{entrance}\n{seen}", tmp_path)
    assert out.splitlines()[-1] == "[]"


FIND = """
import importlib.util, lightning_dcp
assert importlib.util.find_spec("lightning.pytorch.strategies")
"""
TRAINERS = """
from lightning.pytorch import Trainer
assert "megatron" not in sys.modules
for name in ("dynamic_cp", "dynamic_cp_notebook"):
    strategy = Trainer(strategy=name, accelerator="cpu", devices=1, logger=False).strategy
    assert type(strategy) is lightning_dcp.DynamicCPStrategy, strategy
from lightning.pytorch.strategies import StrategyRegistry
import lightning.pytorch.strategies as strategies
assert StrategyRegistry["dynamic_cp"]["init_params"]["start_method"] == "popen"
assert StrategyRegistry["dynamic_cp_notebook"]["init_params"]["start_method"] == "fork"
assert "lightning_dcp" not in type(strategies.__spec__.loader).__module__
assert not any("lightning_dcp" in type(finder).__module__ for finder in sys.meta_path)
"""


IMPORTS = [
    "import lightning_dcp, lightning",
    "import lightning, lightning_dcp",
    "from lightning_dcp import LRSchedule; import lightning_dcp",
    # To look for Lightning is no import of it.
    FIND,
]
# In forks of a process that has what takes longest, and nothing of Lightning, Megatron or ours.
FORKS = f"""
import os, sys, traceback
import torch._dynamo, torchmetrics.functional
assert not {{"lightning", "lightning_dcp", "megatron"}} & set(sys.modules)
for imports in {IMPORTS!r}:
    child = os.fork()
    if not child:
        try:
            exec("import sys\\n" + imports + {TRAINERS!r}, {{}})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By imports, the exit code and what all of them wrote."""
    out, err = run(FORKS, tmp_path_factory.mktemp("imports"))
    return {imports: (code, err) for imports, code in zip(IMPORTS, out.split(), strict=True)}


@pytest.mark.parametrize("imports", IMPORTS)
def test_lightning_knows_the_strategys_names_whatever_is_imported_first(imports, outcomes):
    code, written = outcomes[imports]
    assert code == "0", written[-3000:]


@pytest.mark.parametrize("package", [lightning_dcp, lightning_dcp.data])
def test_a_lazy_package_has_what_it_lists(package):
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is vars(package)[name]
    module = import_module(f"{package.__name__}.{package._MODULES[package.__all__[0]]}")
    assert getattr(package, package.__all__[0]) is getattr(module, package.__all__[0])
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing
    with pytest.raises(ImportError, match="cannot import name"):
        exec(f"from {package.__name__} import nothing")

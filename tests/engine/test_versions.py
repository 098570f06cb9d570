"""Which SGLang the tests run on: the newest supported one, and for a short suite the oldest one (`make oldest`)."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from enginepool.cli.doctor_checks import SGLANG_NEWEST, SGLANG_OLDEST
from enginepool.workers.sglang.patches.private_name import TESTED
from tests.engine.forked import run_code
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Models
from tests.engine.test_sglang_scores import declared

ROOT = Path(__file__).parents[2]


def pinned(file: str) -> str:
    found = re.search(r"^sglang==(.+)$", (ROOT / "requirements" / file).read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_ends_of_the_supported_range_are_those_that_are_tested() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]["sglang"]
    release, newest = SGLANG_NEWEST.rpartition(".")[::2]
    assert required == [f"sglang>={SGLANG_OLDEST},<{release}.{int(newest) + 1}"]
    assert pinned("oldest-engine.txt") == SGLANG_OLDEST
    assert pinned("cpu-engine-no-deps.txt") == SGLANG_NEWEST
    assert f"{SGLANG_OLDEST} to {SGLANG_NEWEST}" == TESTED


@pytest.mark.engine
@pytest.mark.every_version
@pytest.mark.timeout(600)
def test_the_engine_is_of_the_version_that_is_meant(causal: HostedEngine) -> None:
    meant = "oldest-engine.txt" if "ENGINEPOOL_TEST_OLDEST" in os.environ else "cpu-engine-no-deps.txt"
    assert declared(causal).engine == f"sglang {pinned(meant)}"


CHANGED = """
import asyncio, sys
from sglang.srt.managers.scheduler import Scheduler
Scheduler.is_disable_overlap_for_batch = lambda self, batch: False
from enginepool.workers.engine import EngineUnusable
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.host.engine import SglangEngine

async def start():
    try:
        await SglangEngine(EngineSettings(model=sys.argv[1], device="cpu")).start(lambda stage, detail: None)
    except EngineUnusable as error:
        print(error)

asyncio.run(start())
"""


@pytest.mark.engine
@pytest.mark.every_version
def test_an_sglang_with_another_signature_is_refused_for_good_before_the_model_loads(models: Models, tmp_path: Path) -> None:
    """The folder has no weights: the load would fail with another reason."""
    (tmp_path / "config.json").write_bytes((models.causal / "config.json").read_bytes())
    status, said = run_code(CHANGED, str(tmp_path))
    assert status == 0, said
    assert "Scheduler.is_disable_overlap_for_batch(self, batch) has another signature than (self, batch, last_batch)" in said


PACKING = """
import sglang, sglang.srt.entrypoints.engine as engine
from enginepool.workers.sglang.host import build
from enginepool.workers.sglang.patches.signature_check import refuse_unknown
build._keep_graphs(engine.ServerArgs)
refuse_unknown(sglang.__version__, flashinfer=False)
"""


@pytest.mark.engine
@pytest.mark.every_version
def test_the_names_that_packing_replaces_before_an_engine_starts_are_there_and_keep_their_signatures() -> None:
    status, said = run_code(PACKING)
    assert status == 0, said


@pytest.mark.engine
def test_other_programs_can_import_sglang_and_transformers_in_this_environment(tmp_path: Path) -> None:
    """Without the pool's help: what TRL and sentence-transformers import."""
    code = "import sglang; from transformers import AutoModelForCausalLM, PreTrainedModel, ProcessorMixin, Trainer"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

"""Imported once, by the server that engines and pools of these tests are forked from: SGLang, as `build.prepare` imports it."""

import importlib
import os
from typing import Any

from enginepool.workers import cpu_bridge
from enginepool.workers.sglang.host.process import BRIDGE_VARIABLE
from tests.process.preloaded import preload

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ[BRIDGE_VARIABLE] = "1"
cpu_bridge.install()
# It finds the place of the title next to the environment, as long as that is as it was when the process was started.
title: Any = importlib.import_module("setproctitle")
title.setproctitle(title.getproctitle())
preload(
    "enginepool.workers.sglang.host.engine",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
)

"""Imported once by the server that engines of the families test are forked from: SGLang, as `build.prepare` imports it."""

import importlib
import os

from enginepool.workers import cpu_bridge
from enginepool.workers.sglang.host.process import BRIDGE_VARIABLE

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ[BRIDGE_VARIABLE] = "1"
cpu_bridge.install()
for name in ("entrypoints.engine", "managers.scheduler", "managers.detokenizer_manager", "models.registry"):
    importlib.import_module(f"sglang.srt.{name}")

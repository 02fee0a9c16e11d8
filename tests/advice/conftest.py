"""The advice of an engine is followed on each engine."""

from __future__ import annotations

from tests.contract.engine.conftest import bench

__all__ = ["bench"]

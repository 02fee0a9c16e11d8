"""The event loop of a door: uvloop's where it is installed; and the thread that runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future


def new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def serve(
    loop: asyncio.AbstractEventLoop, listening: Coroutine[object, None, None], started: Future[None]
) -> None:
    """Runs the loop in this thread until it is stopped, then closes it. ``started`` gets the error of
    ``listening``, or its success.
    """
    asyncio.set_event_loop(loop)
    try:
        try:
            loop.run_until_complete(listening)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        loop.run_forever()
    finally:
        asyncio.set_event_loop(None)
        loop.close()

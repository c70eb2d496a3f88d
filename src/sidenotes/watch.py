"""Call a recorder for each instruction of the traced file.

There are two mechanisms with the same result: `sys.monitoring` from Python 3.12 on, and
`sys.settrace` before. Both call the recorder before each instruction.

Up to Python 3.12, reading `f_locals` creates a copy that keeps values alive: a value
that `del` removes is freed at the next assignment or at the end of the call.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidenotes.trace import Recorder


def tracing(recorder: "Recorder") -> AbstractContextManager[None]:
    """Call `recorder` for the events of its file, in this thread and `with` block."""
    if sys.version_info >= (3, 12):
        return monitored(recorder)
    return traced(recorder)


@contextmanager
def traced(recorder: "Recorder") -> Iterator[None]:
    """Up to Python 3.11: `sys.settrace`, with an event for each instruction."""

    def begin(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != recorder.file:
            return None
        if frame.f_trace is not None:  # a generator is resumed
            return frame.f_trace
        state = recorder.enter(frame)
        if state is None:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        points = state.plan.points

        def follow(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "opcode":
                state.thrown = False
                if frame.f_lasti in points:
                    recorder.before(state, frame, frame.f_lasti)
            elif event == "exception":
                state.error, state.thrown = arg[0].__name__, True
            elif event == "return":
                how = state.plan.exits.get(frame.f_lasti)
                if state.thrown or how is None:
                    recorder.unwind(state, frame, state.error)
                else:
                    recorder.leave(state, frame, how, arg)
            return follow

        return follow

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        yield
    finally:
        sys.settrace(before)


if sys.version_info >= (3, 12):
    monitoring, events = sys.monitoring, sys.monitoring.events

    @contextmanager
    def monitored(recorder: "Recorder") -> Iterator[None]:
        """From Python 3.12: `sys.monitoring`, disabled where nothing is recorded."""
        tool = next(n for n in range(6) if monitoring.get_tool(n) is None)
        callbacks = callbacks_of(recorder, tool)
        monitoring.use_tool_id(tool, __name__)
        try:
            for event, callback in callbacks.items():
                monitoring.register_callback(tool, event, callback)
            monitoring.set_events(tool, events.PY_START | events.PY_UNWIND)
            monitoring.restart_events()
            yield
        finally:
            monitoring.set_events(tool, 0)
            for plan in recorder.plans.values():
                monitoring.set_local_events(tool, plan.code, 0)
            for event in callbacks:
                monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)

    def callbacks_of(recorder: "Recorder", tool: int) -> dict[int, Any]:
        """The callbacks of each event."""
        thread = threading.get_ident()
        local = events.INSTRUCTION | events.PY_RETURN | events.PY_YIELD

        def start(code: CodeType, offset: int) -> Any:
            if recorder.plan(code) is None:
                return monitoring.DISABLE
            if threading.get_ident() == thread:
                if not monitoring.get_local_events(tool, code):
                    monitoring.set_local_events(tool, code, local)
                recorder.enter(sys._getframe(1))
            return None

        def instruction(code: CodeType, offset: int) -> Any:
            if offset not in recorder.plans[id(code)].points:
                return monitoring.DISABLE
            frame = sys._getframe(1)
            if state := recorder.find(frame):
                recorder.before(state, frame, offset)
            return None

        def leave(how: str, value: Any) -> None:
            frame = sys._getframe(2)
            if state := recorder.find(frame):
                recorder.leave(state, frame, how, value)

        def unwind(code: CodeType, offset: int, error: BaseException) -> None:
            frame = sys._getframe(1)
            if state := recorder.find(frame):
                recorder.unwind(state, frame, type(error).__name__)

        return {
            events.PY_START: start,
            events.INSTRUCTION: instruction,
            events.PY_RETURN: lambda code, offset, value: leave("return", value),
            events.PY_YIELD: lambda code, offset, value: leave("yield", value),
            events.PY_UNWIND: unwind,
        }

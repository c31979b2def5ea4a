"""For how long whom may be silent, stopped or failing before something is done.

Owns these times. Must not know what is done.
"""

from dataclasses import dataclass

STOPPED_S = 2.0
"""For how long a process may be stopped, unless something else is said."""


@dataclass(frozen=True, kw_only=True)
class SupervisionLimits:
    """All times in seconds.

    Attributes:
        start_s: for loading the models until a token comes.
        watch_interval_s: between two looks at processes.
        stopped_s: for how long a process may be stopped.
        probe_interval_s: between two probes; probe_timeout_s: of one.
        hang_s: without any answer of the scheduler, and since its engine was last seen not loaded;
            longer than the deadline that the scheduler itself sets its engine, or both would act
            at once.
        reload_s: without any answer while the engine is not loaded: the scheduler is then reloading
            it.
        orphaned_load_s: for how long an engine may be loading without a process of it.
        model_hang_s: without any answer of another model.
        server_hang_s: without any answer of tritonserver, over HTTP and over gRPC.
        replace_s: for unloading a lost model and loading it again.
        drain_s: for what a healthy process has in hand whose model is loaded again for another.
        max_reloads: of one model within `stable_s`; where it is lost once more, the server is
            restarted.
        stranded_s: until the server is restarted to end the calls that were open in a lost process,
            while other requests run.
        stable_s: a server that served so long has made up for earlier failures.
        backoff_s: before the second restart in a row; doubles with each one more, up to
            `max_backoff_s`.
        max_failed_starts: this many in a row end the supervision. Nothing else does: whoever can
            end a server time and again must not be able to end it for good.
    """

    start_s: float = 900.0
    watch_interval_s: float = 0.25
    stopped_s: float = STOPPED_S
    probe_interval_s: float = 5.0
    probe_timeout_s: float = 5.0
    hang_s: float = 45.0
    reload_s: float = 900.0
    orphaned_load_s: float = 5.0
    model_hang_s: float = 60.0
    server_hang_s: float = 15.0
    replace_s: float = 60.0
    drain_s: float = 30.0
    max_reloads: int = 5
    stranded_s: float = 30.0
    stable_s: float = 60.0
    backoff_s: float = 1.0
    max_backoff_s: float = 10.0
    max_failed_starts: int = 5


class Silence:
    """How long the scheduler has been silent, and for how long it may be.

    While its engine is loaded anew, nobody can be answered; that does not count as silence of a
    scheduler whose engine is loaded again.
    """

    def __init__(self, limits: SupervisionLimits, now: float) -> None:
        self._limits = limits
        self._answered = now
        self._unloaded = now  # when the engine was last seen so

    def note_answer(self, now: float) -> None:
        """The scheduler has answered."""
        self._answered = now

    def note_silence(self, now: float, *, is_loaded: bool) -> str | None:
        """No answer came; returns what to say when that is so for too long, else None.

        Args:
            is_loaded: whether its engine is, at this moment.
        """
        if not is_loaded:
            self._unloaded = now
            silent_s, allowed_s = now - self._answered, self._limits.reload_s
        else:
            silent_s = now - max(self._answered, self._unloaded)
            allowed_s = self._limits.hang_s
        return f"has not answered for {silent_s:.0f} s" if silent_s > allowed_s else None

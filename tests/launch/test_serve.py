"""What `charonia serve` makes of the scheduler's settings."""

from charonia.config import SchedulerArgs
from charonia.launch.commands.serve import supervision_limits
from charonia.supervision.server.judge import SupervisionLimits


def test_the_launcher_waits_longer_than_the_scheduler_does_for_its_engine():
    patient = SchedulerArgs(load_timeout_s=5000, min_step_deadline_s=70)
    limits = supervision_limits(patient)
    assert min(limits.start_s, limits.reload_s) > patient.load_timeout_s
    assert limits.hang_s > patient.min_step_deadline_s
    hasty = supervision_limits(SchedulerArgs(load_timeout_s=2))
    assert hasty.start_s == SupervisionLimits.start_s, "a start is more than loading the engine"

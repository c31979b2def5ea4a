"""What the scheduler learns of how long answers are, where only their text tells their ends."""

import pytest

from core.bench import Bench, expected
from support.echo import EchoExecutor


@pytest.mark.parametrize(("is_cancelled", "num_running"), [(False, 4), (True, 1)])
def test_answers_that_end_at_a_stop_string_leave_room_for_more(is_cancelled, num_running):
    """Each may be as long as the KV cache is large. One whose client has gone tells nothing."""
    executor = EchoExecutor(num_blocks=17, block_size=16, max_model_len=256, max_num_seqs=4)
    bench = Bench(executor, capacity_scheduler_policy="expected_peak")
    text = bench.tokenizer.decode(expected("a", 60))
    bench.add("a", max_tokens=240, stop=(text[25:28],))
    if is_cancelled:
        bench.run(10)
        bench.cancel("a")
    bench.run()
    for key in "bcde":
        bench.add(key, max_tokens=240)
    bench.core.step()
    assert bench.core.metrics.gauges["charonia_requests_running", ""] == num_running

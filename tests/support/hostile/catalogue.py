"""All attacks. Owns their names and what they may leave. Must not know what any of them does."""

from support.hostile import calls, clients, wire
from support.hostile.target import SERVER_BYTES, Attack, Run

_RUNS = (
    wire.noise_on_ports,
    wire.noise_on_sockets,
    wire.half_of_http,
    wire.half_of_grpc,
    wire.heads_of_every_kind,
    wire.bodies_that_exhaust_stacks,
    clients.vanish_in_streams,
    clients.vanish_in_uploads,
    clients.never_read,
    calls.heaviest_parameters,
    calls.thousand_unary,
    calls.floods_of_cancels,
    calls.large_prompts,
    calls.nonsense_for_inner_models,
    calls.odd_requests,
)
# A million chunks are as many pieces of memory in tritonserver's own HTTP front end, which are
# freed, but not given back.
_KEPT_BYTES = {wire.bodies_that_exhaust_stacks: 3 * 2**29}


def _attack(run: Run) -> Attack:
    return Attack(run.__name__.replace("_", " "), run, _KEPT_BYTES.get(run, SERVER_BYTES))


ATTACKS = {attack.name: attack for attack in map(_attack, _RUNS)}
"""By name."""

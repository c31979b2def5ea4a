"""All attacks. Owns their names. Must not know what any of them does."""

from support.hostile import calls, clients, wire
from support.hostile.target import Attack

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
ATTACKS = {
    attack.name: attack for attack in (Attack(run.__name__.replace("_", " "), run) for run in _RUNS)
}
"""Attacks by name."""

"""An observer of a group is told of each step that computes for it, and of no other."""

from charonia.control import FixedDepth, Group, Request, Speculation
from support.echo import EchoDrafter
from support.stepping import Bench, make_request


class Observer:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def on_step(
        self,
        request: Request,
        num_tokens: int,
        num_drafts: int,
        began_at: float,
        ended_at: float,
    ) -> None:
        assert began_at <= ended_at
        self.seen.append((request.num_computed, num_tokens, num_drafts))


def test_each_step_of_a_group_is_told_with_its_place_and_its_drafts() -> None:
    speculation = Speculation(max_drafts=3, policy=FixedDepth(), drafter=EchoDrafter(256))
    bench = Bench(speculation=speculation)
    observer = Observer()
    request = make_request("a", max_tokens=20, group=Group("a", observer))
    bench.add(request, make_request("b", max_tokens=25))  # nobody observes that one
    while not request.is_ended:
        bench.step()
    num_told = len(observer.seen)
    bench.step()
    assert len(observer.seen) == num_told
    places = [place for place, _, _ in observer.seen]
    assert places == sorted(set(places))
    assert observer.seen[0] == (0, 8, observer.seen[0][2])
    assert sum(num_drafts for _, _, num_drafts in observer.seen) == request.drafts.num_drafted > 0

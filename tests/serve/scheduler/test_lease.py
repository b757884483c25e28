"""Terms of two scheduler actors."""

from hypothesis import given
from hypothesis import strategies as st

from ray_slo.serve.scheduler.lease import Lease, candidate_name


def test_the_spare_has_a_name_that_no_group_can_have():
    assert candidate_name("app#m", 0) == "app#m"
    assert candidate_name("app#m", 1) == "app#m#~spare"


STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "renew", "heard", "dies"]), st.integers(0, 1)), max_size=30
)


@given(STEPS, st.randoms(use_true_random=False))
def test_no_term_is_used_twice_and_each_is_higher_than_all_that_were_known(steps, random):
    leases, led, said = [Lease(0), Lease(1)], [], [0]
    for what, number in steps:
        lease, known = leases[number], random.choice(said)  # a client may know old terms only
        before = lease.term
        if what == "dies":
            leases[number] = Lease(number)
            continue
        if what == "heard":
            assert lease.heard(known) == (0 < before < known)
            assert lease.term == (0 if before < known else before)
            continue
        if what == "renew" and not before:
            continue
        is_new = lease.take(known) if what == "take" else lease.renew()
        assert lease.term > 0 and lease.term % 2 == number
        assert is_new == (lease.term != before)
        if is_new:
            assert lease.term > known
            led.append(lease.term)
        said.append(lease.term)
    # Only one that died and met nobody who knew its terms can use one again. Its frontends know
    # them, and workers refuse the scheduler's id.
    if not any(what == "dies" for what, _ in steps):
        assert len(set(led)) == len(led)

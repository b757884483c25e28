"""One timeline per policy, small enough to check by hand (`tests/goldens/timeline.py` reads it).

The lines are the expected values. The comments say why they are right, by the paper's rule. Times
are seconds. ℓ(b) is the time of a batch of b requests.
"""

from tests.goldens.timeline import check, cluster

# ℓ(b) = 10 + 10·b ms: 20, 30, 40, 50, … ms.
ONE = {"m": {"v": (0.010, 0.010)}}
# 40 ms for one request of "large", 10 ms for one of "small".
TWO_VARIANTS = {"m": {"large": (0.020, 0.020), "small": (0.004, 0.006)}}
ACCURACY = {"large": 90.0, "small": 80.0}


def test_eager_takes_what_is_there():
    check(
        "eager",
        cluster(ONE, 2, max_batch=4),
        """
        0.000 > a arrives, due 0.100
        0.000 dispatch a on w0, ends 0.020        # a worker is idle, so nothing waits
        0.002 > b c arrive, due 0.102
        0.002 dispatch b c on w1, ends 0.032
        0.005 > d e f g h arrive, due 0.105       # all workers are busy
        0.007 > w1 leaves                         # b and c come back, with their old deadline
        0.012 > i arrives, due 0.035
        0.012 drop i: would_miss                  # w0 is free at 0.020, and i would end at 0.040
        0.015 > e is cancelled
        0.020 dispatch b c d f on w0, ends 0.070  # by deadline, without e; 4 are a full batch
        0.070 dispatch g h on w0, ends 0.100
        0.080 > w1 joins
        0.200 > j k l arrive, due 0.235
        0.200 dispatch j k on w0, ends 0.230      # a batch of 3 would end at 0.240, too late
        0.200 dispatch l on w1, ends 0.220        # the rest goes to the other worker
        """,
    )


def test_timeout_waits_for_the_oldest_request():
    check(
        "timeout",
        cluster(ONE, 1, max_batch=4),
        """
        0.000 > a arrives, due 0.100
        0.004 > b c arrive, due 0.104
        0.030 dispatch a b c on w0, ends 0.070    # 30 ms after the oldest, a
        0.040 > d e f g h arrive, due 0.140
        0.070 dispatch d e f g on w0, ends 0.120  # full: due at once, when the worker is free
        0.120 dispatch h on w0, ends 0.140        # h is due since 0.070
        0.200 > i arrives, due 0.230
        0.210 dispatch i on w0, ends 0.230        # alone: it goes before the wait makes it late
        0.300 > j arrives, due 0.340
        0.301 > k l arrive, due 0.400
        0.320 drop j: would_miss                  # not alone, so it waits until ℓ(1) is too long
        0.331 dispatch k l on w0, ends 0.361      # now the oldest is k
        """,
        timeout_ms=30,
    )


SYMPHONY = {"m": {"v": (1.0, 5.0)}}
STAGGERED = """
    0.000 > a arrives, due 12.000
    0.750 > b arrives, due 12.750
    1.500 > c arrives, due 13.500
    2.250 > d arrives, due 14.250
    2.250 dispatch a b c d on w0, ends 11.250   # frontrun: 12 − ℓ(5) = 2 has passed; latest: 3
    3.000 > e arrives, due 15.000
    3.750 > f arrives, due 15.750
    4.500 > g arrives, due 16.500
    5.250 > h arrives, due 17.250
    5.250 dispatch e f g h on w1, ends 14.250   # frontrun: 15 − 10 = 5
    6.000 > i arrives, due 18.000
    6.750 > j arrives, due 18.750
    7.500 > k arrives, due 19.500
    8.250 > l arrives, due 20.250
    8.250 dispatch i j k l on w2, ends 17.250
    9.000 > m arrives, due 21.000
    9.750 > n arrives, due 21.750
    10.500 > o arrives, due 22.500
    11.250 > p arrives, due 23.250
    11.250 dispatch m n o p on w0, ends 20.250  # w0 is free just now: the workers are staggered
"""


def test_deferred_staggers_batches_as_in_symphonys_example():
    """Symphony §3.3: 3 workers, ℓ(b) = b + 5, SLO 12, a request every 0.75."""
    there = cluster(SYMPHONY, 3, slo_s=12.0)
    check("deferred", there, STAGGERED, exact=True)
    check("deferred", there, STAGGERED, objective="consolidate")


def test_deferred_waits_while_waiting_is_free():
    check(
        "deferred",
        cluster(ONE, 1),
        """
        0.000 > a arrives, due 0.100
        0.005 > b c arrive, due 0.105
        0.012 > d arrives, due 0.035              # d is the head now: due first
        0.012 dispatch d on w0, ends 0.032        # frontrun, 0.035 − ℓ(2) = 0.005, has passed
        0.050 dispatch a b c on w0, ends 0.090    # frontrun of a: 0.100 − ℓ(4) = 0.050
        0.100 > e arrives, due 0.200
        0.103 > f g arrive, due 0.203
        0.106 > f is cancelled
        0.110 > h arrives, due 0.150              # the head; 0.150 − ℓ(4) has passed
        0.110 dispatch h e g on w0, ends 0.150    # e and g still fit: ℓ(3) = 40 ms
        0.120 > i arrives, due 0.155
        0.120 drop i: would_miss                  # w0 is free at 0.150
        """,
        objective="consolidate",
    )


def test_deferred_serves_at_once_while_the_load_is_low():
    """The objective `responsive`, the default."""
    check(
        "deferred",
        cluster(ONE, 1),
        """
        0.000 > a arrives, due 0.100
        0.000 dispatch a on w0, ends 0.020        # no load was measured yet: it does not wait
        0.003 > b c d e f g h arrive, due 0.103
        0.020 dispatch b c d e f g h on w0, ends 0.100   # ℓ(7) = 80 ms: all are in time
        0.200 > i arrives, due 0.240
        0.202 > j k l n o p q r arrive, due 0.302
        0.202 drop i: shed                        # with i, only 2 could go: 0.240 − 0.202 = 38 ms
        0.202 dispatch j k l n o p q r on w0, ends 0.292   # the burst is served whole
        """,
    )


def test_deferred_sends_the_nearest_latest_first_and_ahead_of_time():
    """Two models on one worker; a batch travels for 2 ms."""
    check(
        "deferred",
        cluster({"m": {"v": (0.010, 0.010)}, "n": {"u": (0.002, 0.028)}}, 1, delay_s=0.002),
        """
        0.000 > a arrives for m, due 0.100
        0.003 > x arrives for n, due 0.070
        0.004 > b c arrive for m, due 0.104
        0.010 > y arrives for n, due 0.090
        0.034 dispatch x y on w0 by u, ends 0.068   # frontrun of x: 0.070 − 0.002 − ℓ(3) = 0.034
        0.066 drop a: shed                          # a and no other could go at 0.068 until 0.100
        0.066 dispatch b c on w0 by v, ends 0.098   # sent 2 ms before w0 is free
        """,
        objective="consolidate",
    )


def test_flex_preempts_for_a_batch_that_is_larger_by_lambda():
    """SHEPHERD, Figure 4: ℓ(b) = 9 + b ms. As 20 ≥ 3.03 · 1, the burst preempts a."""
    check(
        "flex",
        cluster({"m": {"v": (0.001, 0.009)}}, 1, max_batch=32),
        """
        0.000 > a arrives, due 0.010
        0.000 dispatch a on w0, ends 0.010
        0.005 > b c d e f g h i j k l m n o p q r s t u arrive, due 0.034
        0.005 preempt w0
        0.005 drop a: would_miss                  # a comes back, and cannot be in time any more
        0.005 dispatch b c d e f g h i j k l m n o p q r s t u on w0, ends 0.034
        """,
    )


def test_flex_lets_a_batch_run_that_is_not_small_enough():
    """Two models: 80 ms for one request of "big"; ℓ(b) = 10 + 2·b ms for "small"."""
    check(
        "flex",
        cluster({"big": {"v": (0.040, 0.040)}, "small": {"u": (0.002, 0.010)}}, 1, max_batch=8),
        """
        0.000 > a arrives for big, due 0.100
        0.000 dispatch a on w0 by v, ends 0.080
        0.010 > b c d arrive for small, due 0.060   # 3 < 3.03 · 1
        0.048 drop b c d: would_miss                # from here on not even one could be in time
        0.100 > e arrives for big, due 0.200
        0.100 dispatch e on w0 by v, ends 0.180
        0.110 > f g h i arrive for small, due 0.210 # 4 ≥ 3.03 · 1, although they could wait
        0.110 preempt w0
        0.110 dispatch f g h i on w0 by u, ends 0.128
        0.120 drop e: would_miss                    # 0.200 − 0.080
        0.300 > j arrives for big, due 0.400
        0.300 > k l arrive for small, due 0.400
        0.300 dispatch k l on w0 by u, ends 0.314   # the larger batch first
        0.314 dispatch j on w0 by v, ends 0.394
        """,
    )


def test_flex_without_preemption_waits_for_the_end():
    check(
        "flex",
        cluster({"m": {"v": (0.001, 0.009)}}, 1, max_batch=32),
        """
        0.000 > a arrives, due 0.010
        0.000 dispatch a on w0, ends 0.010
        0.005 > b c d e f g h i j k l m n o p q r s t u arrive, due 0.034
        0.010 dispatch b c d e f g h i j k l m n o p on w0, ends 0.034   # 24 ms: ℓ(15)
        0.024 drop q r s t u: would_miss                                 # 0.034 − ℓ(1)
        """,
        preemption=False,
    )


def test_deferred_flex_preempts_only_for_a_gain():
    """Two models: 80 ms for one request of "big"; ℓ(b) = 10 + 2·b ms for "small"."""
    check(
        "deferred_flex",
        cluster({"big": {"v": (0.040, 0.040)}, "small": {"u": (0.002, 0.010)}}, 1, max_batch=8),
        """
        0.000 > a arrives for big, due 0.100
        0.000 dispatch a on w0 by v, ends 0.080
        0.010 > b c d e f g h i arrive for small, due 0.060
        0.010 preempt w0                            # rescued: 8; lost: 1; so the gain is 7
        0.010 dispatch b c d e f g h i on w0 by u, ends 0.036
        0.020 drop a: would_miss                    # 0.100 − 0.080
        0.200 > j arrives for big, due 0.300
        0.200 dispatch j on w0 by v, ends 0.280
        0.210 > k l m n arrive for small, due 0.310 # FLEX would preempt for them
        0.280 dispatch k l m n on w0 by u, ends 0.298   # all in time without: nothing is rescued
        """,
    )


RAMSIS = {"m": {"slow": (0.060, 0.0), "fast": (0.020, 0.0)}}  # 60 or 20 ms per request


def test_ramsis_uses_quiet_moments_for_the_accurate_variant():
    """5 requests/s: the next one most likely comes later than in 60 ms."""
    check(
        "ramsis",
        cluster(RAMSIS, 1, accuracy={"slow": 90.0, "fast": 70.0}),
        """
        0.000 > a arrives, due 0.100
        0.000 dispatch a on w0 by slow, ends 0.060
        0.500 > b c arrive, due 0.600               # 2 · 60 ms are too long
        0.500 dispatch b on w0 by fast, ends 0.520  # so one of them is quick,
        0.520 dispatch c on w0 by slow, ends 0.580  # and the other has 80 ms
        2.000 > d arrives, due 2.015
        2.000 drop d: would_miss                    # less than the 20 ms of the fastest
        """,
        load_rps=5,
    )


def test_ramsis_is_quick_where_the_load_is_high():
    """40 requests/s: 60 ms each would keep up with 17 requests/s only."""
    check(
        "ramsis",
        cluster(RAMSIS, 1, accuracy={"slow": 90.0, "fast": 70.0}),
        """
        0.000 > a arrives, due 0.100
        0.000 dispatch a on w0 by fast, ends 0.020
        0.500 > b c arrive, due 0.600
        0.500 dispatch b on w0 by fast, ends 0.520
        0.520 dispatch c on w0 by fast, ends 0.540
        """,
        load_rps=40,
    )


def test_kairos_matches_sizes_to_unlike_workers():
    """Kairos, Figure 5: ℓ(s) = s / 2 on the strong worker, and s on the weak one; SLO 8."""
    check(
        "kairos",
        cluster(
            {"m": {"v": (0.5, 0.0)}}, {"strong": "fast", "weak": "slow"}, slo_s=8.0, max_batch=10
        ),
        """
        0.000 > a arrives, size 4, due 8.000
        0.000 > b arrives, size 10, due 8.000
        0.000 dispatch a on weak, ends 4.000      # the 4 costs 2 on either; the 10 is late on weak
        0.000 dispatch b on strong, ends 5.000
        4.000 > c arrives, size 8, due 12.000     # on weak: 4 + 8 = 12, more than 0.98 of the SLO
        4.000 > d arrives, size 4, due 12.000     # on strong: 5 + 2; on weak: 4 + 4
        4.000 dispatch d on weak, ends 8.000
        4.100 > e arrives, size 10, due 9.000
        4.100 drop e: would_miss                  # 5 s on an idle strong worker; there are 4.9
        5.000 dispatch c on strong, ends 9.000    # c was planned for it
        6.000 > f arrives, size 2, due 14.000
        6.500 > f is cancelled
        """,
    )


# A detector takes 20 ms, and finds 4 faces. Recognisers: large 20 ms, small 10 ms.
FACES = {"detect": {"d": (0.0, 0.020)}, "name": {"large": (0.0, 0.020), "small": (0.0, 0.010)}}
TREE = {"parents": {"detect": None, "name": "detect"}, "factors": {"d": {"name": 4.0}}}


def faces():
    """The plan: 5 frames/s, all faces by "large". "small" has nothing to do."""
    return cluster(
        FACES,
        3,
        max_batch=4,
        accuracy={"d": 90.0, "large": 90.0, "small": 80.0},
        assigned={"w0": ("d", 4, 5.0), "w1": ("large", 4, 20.0), "w2": ("small", 4, 0.0)},
    )


def test_pipeline_routes_late_requests_to_faster_variants():
    """Loki §5.2: budgets are twice the times of batches, so 40, 40 and 20 ms."""
    check(
        "pipeline",
        faces(),
        """
        0.000 > f arrives for detect, due 0.100
        0.000 dispatch f on w0 by d, ends 0.020
        0.020 > h i j k arrive for name, made by d on w0 in 0.020, due 0.100
        0.020 dispatch h i j k on w1 by large, ends 0.040
        0.245 > l arrives for name, made by d on w0 in 0.045, due 0.300
        0.245 dispatch l on w2 by small, ends 0.255     # late by 5 ms: 20 − 5 allows 10, not 20
        0.362 > m arrives for name, made by d on w0 in 0.062, due 0.400
        0.362 drop m: would_miss                        # late by 22 ms: nothing is that fast
        """,
        drop="opportunistic",
        queues="worker",
        **TREE,
    )


def test_pipeline_keeps_what_can_still_be_in_time():
    """The rule `slack`, the default: the time that is left decides."""
    check(
        "pipeline",
        faces(),
        """
        0.000 > f arrives for detect, due 0.100
        0.000 dispatch f on w0 by d, ends 0.020
        0.020 > h i j k arrive for name, made by d on w0 in 0.020, due 0.100
        0.020 dispatch h i j k on w1 by large, ends 0.040
        0.362 > l arrives for name, made by d on w0 in 0.062, due 0.400
        0.362 dispatch l on w1 by large, ends 0.382     # late by 22 ms, but 38 ms are left
        0.500 > m n o p q arrive for name, made by d on w0 in 0.060, due 0.535
        0.500 dispatch m n o p on w1 by large, ends 0.520
        0.500 dispatch q on w2 by small, ends 0.510     # after w1 it would end at 0.540
        0.505 > w2 leaves                               # q comes back, and only w1 is left
        0.515 drop q: would_miss                        # 0.535 − 20 ms, and w1 is free at 0.520
        0.601 > r arrives for detect, due 0.635
        0.601 drop r: shed                              # 20 ms here, and 20 ms at "name"
        """,
        **TREE,
    )


def test_price_is_accurate_where_time_is_cheap():
    check(
        "price",
        cluster(TWO_VARIANTS, 1, accuracy=ACCURACY),
        """
        0.000 > a arrives, due 0.100
        0.000 dispatch a on w0 by large, ends 0.040     # nothing else waits
        0.100 > b c d e f g h i j k arrive, due 0.200
        0.100 dispatch b c d e f g h i j k on w0 by small, ends 0.146   # large: 4 of 10 in 100 ms
        0.300 > l arrives, due 0.400
        0.300 dispatch l on w0 by large, ends 0.340
        0.301 > m arrives, due 0.325
        0.301 drop m: would_miss                        # w0 is free at 0.340
        """,
    )


def test_auto_begins_with_deferred_for_one_variant():
    """The first guess. The lines are those of `deferred`."""
    check(
        "auto",
        cluster(ONE, 1),
        """
        0.000 > a arrives, due 0.100
        0.000 dispatch a on w0, ends 0.020
        0.005 > b c arrive, due 0.105
        0.012 > d arrives, due 0.035
        0.012 drop d: would_miss                  # w0 is free at 0.020
        0.020 dispatch b c on w0, ends 0.050
        0.100 > e arrives, due 0.200
        0.103 > f g arrive, due 0.203             # 3 are enough for the measured load
        0.103 dispatch e f g on w0, ends 0.143
        0.106 > f is cancelled                    # too late: it runs
        0.110 > h arrives, due 0.150
        0.110 drop h: would_miss                  # w0 is free at 0.143
        """,
    )


def test_auto_begins_with_price_for_variants():
    check(
        "auto",
        cluster(TWO_VARIANTS, 1, accuracy=ACCURACY),
        """
        0.000 > a arrives, due 0.100
        0.000 dispatch a on w0 by large, ends 0.040
        0.100 > b c d e f g h i j k arrive, due 0.200
        0.100 dispatch b c d e f g h i j k on w0 by small, ends 0.146
        """,
    )


def test_auto_goes_on_with_the_best_setting_of_a_rehearsal():
    check(
        "auto",
        cluster(ONE, 1),
        """
        0.000 > a arrives, due 0.100
        0.000 dispatch a on w0, ends 0.020        # `deferred`, as above
        0.010 > b arrives, due 0.110
        0.015 > deferred objective=consolidate is best in a rehearsal
        0.080 dispatch b on w0, ends 0.100        # frontrun of b: 0.110 − ℓ(2) = 0.080
        0.090 > c arrives, due 0.190
        0.160 dispatch c on w0, ends 0.180        # 0.190 − ℓ(2)
        """,
    )


def test_eager_counts_items_and_not_requests():
    check(
        "eager",
        cluster(ONE, 1, max_batch=4),
        """
        0.000 > a arrives, size 4, due 0.100
        0.000 dispatch a on w0, ends 0.050        # ℓ(4)
        0.010 > b arrives, size 3, due 0.110
        0.011 > c arrives, size 2, due 0.131
        0.050 dispatch b on w0, ends 0.090        # b and c have 5 items
        0.090 dispatch c on w0, ends 0.120
        0.200 > d arrives, size 5, due 0.300
        0.200 drop d: would_miss                  # no batch has more than 4 items
        """,
    )


def test_eager_alone_serves_with_the_first_variant():
    """The author's preferred one. An application puts a choice around it (`test_days.py`)."""
    check(
        "eager",
        cluster(TWO_VARIANTS, 1, accuracy=ACCURACY),
        """
        0.000 > a b c d e f arrive, due 0.100
        0.000 dispatch a b c d on w0 by large, ends 0.100   # ℓ(4) = 100 ms
        0.000 drop e f: would_miss
        """,
    )


def test_requests_without_a_worker_wait_for_one_until_their_deadline():
    check(
        "eager",
        cluster(ONE, 1),
        """
        0.000 > a b arrive, due 0.100
        0.000 dispatch a b on w0, ends 0.030
        0.010 > w0 fails                          # the two have their error, and do not come back
        0.020 > c arrives, due 0.120
        0.020 dispatch c on w0, ends 0.040
        0.025 > d arrives, due 0.090
        0.030 > w0 leaves
        0.090 drop d: no_worker                   # another one could have come until now
        0.095 > w0 joins
        0.095 dispatch c on w0, ends 0.115
        """,
    )

"""An autoscaling policy that makes Serve's autoscaler follow the plan: the planner sets the number
of replicas of each kind.

Serve calls the policy in its controller many times per second, so the policy must not block. It
has one call to the planner in progress, and polls the result. While the planner does not answer (it
is restarting, gone, or has no plan yet), the last target stays.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from ray_slo.serve.config.spec import AppSpec, worker_deployment
from ray_slo.serve.planner.links import find_planner
from ray_slo.serve.planner.plugin import planner_of

logger = logging.getLogger(__name__)

_ASK_EVERY_S = 0.5
_ANSWER_S = 10.0  # after this, the actor is looked up again


class PlanAutoscaling:
    """Serve calls this for the target number of replicas.

    Args:
        frontend: name of the frontend's deployment, as in the specification.
        kind: kind of worker.
    """

    def __init__(self, frontend: str, kind: str) -> None:
        self._frontend = frontend
        self._kind = kind
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="ray-slo-plan")
        self._looking: Future[Any] | None = None
        self._actor: Any = None
        self._answer: Any = None  # result of the call in progress
        self._asked_at = 0.0
        self._target: int | None = None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the target within the bounds, and an empty state."""
        try:
            self._follow(context, time.monotonic())
        except Exception as error:
            logger.debug("the plan of %s cannot be read (%r); as before", self._kind, error)
            self._actor = self._answer = None
        # Before the first answer, keep the current number, which may be above the minimum.
        target = context.target_num_replicas if self._target is None else self._target
        least = context.capacity_adjusted_min_replicas
        return max(least, min(target, context.capacity_adjusted_max_replicas)), {}

    def _follow(self, context: AutoscalingContext, now: float) -> None:
        """Take the answer if there is one. Ask again if it is time."""
        if self._answer is not None:
            done, _ = ray.wait([self._answer], timeout=0)
            if done:
                answer, self._answer = self._answer, None
                target = ray.get(answer)
                self._target = self._target if target is None else int(target)
            elif now - self._asked_at > _ANSWER_S:
                raise TimeoutError("no answer")
        if self._answer is not None or now - self._asked_at < _ASK_EVERY_S:
            return
        if self._actor is None:
            self._actor = self._found(context)
        if self._actor is not None:
            self._asked_at = now
            most = context.capacity_adjusted_max_replicas
            self._answer = self._actor.target.remote(self._kind, most)

    def _found(self, context: AutoscalingContext) -> Any:
        """Return the actor. It is looked up in the background, and None until it is found.

        Raises:
            ValueError: there is none.
        """
        if self._looking is None:
            # Serve numbers deployments with equal names in an application. The frontend and its
            # workers get the same number.
            usual = worker_deployment(self._frontend, self._kind)
            frontend = self._frontend + context.deployment_name.removeprefix(usual)
            self._asked_at = time.monotonic()
            self._looking = self._threads.submit(find_planner, f"{context.app_name}#{frontend}")
        if not self._looking.done():
            return None
        looking, self._looking = self._looking, None
        return looking.result()


def autoscaling(spec: AppSpec, kind: str) -> AutoscalingConfig:
    """Return Serve's autoscaling configuration for a kind of worker that the planner scales.

    Additional replicas are started at once. Replicas are stopped only when the plan has wanted
    fewer for an interval, so that noise in the demand does not stop and start processes. A planner
    that waits itself (`PlannerPlugin.waits`) is followed at once.
    """
    worker = spec.workers[kind]
    bounds, delays = worker.replica_bounds, worker.autoscaling
    assert spec.planner is not None and bounds is not None
    up_s, down_s = delays.upscale_delay_s, delays.downscale_delay_s
    if planner_of(spec).waits:
        up_s = down_s = 0.0
    return AutoscalingConfig(
        min_replicas=bounds[0],
        initial_replicas=worker.num_replicas,
        max_replicas=bounds[1],
        # If there is no replica, Serve starts one against the policy, unless this aggregate of the
        # requests in the last half minute is 0.
        aggregation_function="min",
        upscale_delay_s=up_s,
        downscale_delay_s=spec.planner.interval_s if down_s is None else down_s,
        downscale_to_zero_delay_s=None if down_s == 0 else delays.downscale_to_zero_delay_s,
        policy=AutoscalingPolicy(
            policy_function=PlanAutoscaling,
            policy_kwargs={"frontend": spec.deployment_name, "kind": kind},
        ),
    )

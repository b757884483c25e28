"""Serve's own settings of an application, compared with what it needs.

A config file of Serve can change options of our deployments beside `args`: in `deployments:`, of
the application, and of the proxies. Serve applies most of them without a restart. Settings that
would break the application are refused here, with what to write instead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray_slo.core.text import quoted
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.config.workers import NOT_OURS
from ray_slo.serve.errors import ConfigError
from ray_slo.serve.planner.autoscaling import PlanAutoscaling
from ray_slo.serve.ray_private.actors import usable_nodes
from ray_slo.serve.ray_private.deploy import is_router, keeps_one_loop

logger = logging.getLogger(__name__)

# What waits in Serve is seen by no scheduler, so all our deployments accept every call.
UNBOUNDED = 100_000
_EVERY_S = 10.0  # seconds between two looks; Serve's period of health checks
_ANSWER_S = 10.0  # seconds for Serve's controller to answer
_AGAIN_S = 60.0  # seconds until the same refusals are logged again
_POLICY = f"{PlanAutoscaling.__module__}.{PlanAutoscaling.__name__}"
# What makes Serve replace all replicas: then those that run are not about the new config.
_CODE = ("import_path", "args", "runtime_env")

Details = Mapping[str, Any]


class Settings:
    """Serve's settings of an application, as its frontend sees them.

    Args:
        app: name of the application.
        frontend: name of the frontend's deployment.
        workers: names of the workers' deployments by kind.
        details: function that returns what Serve's controller says of all applications. It blocks.

    Attributes:
        refused: settings that the application cannot run well with, in words. Not empty only if
            they were changed while it runs.
    """

    def __init__(
        self,
        spec: AppSpec,
        app: str,
        frontend: str,
        workers: Mapping[str, str],
        details: Callable[[], Details],
    ) -> None:
        self._spec = spec
        self._app = app
        self._names = frontend, workers
        self._details = details
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray-slo-settings")
        self._code: Any = None
        self._said_at = 0.0
        self._frontend_nodes: list[str] = []
        self.refused: list[str] = []

    async def begin(self) -> AppSpec:
        """Return the specification with the number of frontends that Serve runs.

        Raises:
            ConfigError: one sentence per setting that the application cannot run with.
        """
        try:
            details = await self._read()
        except Exception as error:
            logger.warning("Serve's settings will be checked later: %r", error)
            return self._spec
        about = _about(details, self._app)
        self._code = _code_of(about)
        try:
            refused = self._refusals(details)
        except Exception:  # another Ray may say it in other words
            logger.exception("Serve's settings cannot be compared")
            return self._spec
        if refused:
            raise ConfigError("; ".join(refused))
        frontend = about.get("deployments", {}).get(self._names[0], {})
        running = int(frontend.get("target_num_replicas") or 0)
        if self._spec.embedded or running < 2:
            return self._spec
        return self._spec.model_copy(update={"num_frontends": running})

    async def watch(self) -> None:
        """Look again from time to time, and log what is refused as an error.

        The frontend goes on: if it failed Serve's health check, Serve would end it, the next one
        would refuse to start, and every request would wait in Serve's proxies without an answer.
        """
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                self.look(await self._read(), time.monotonic())
            except Exception as error:
                logger.info("Serve's settings cannot be read: %r", error)

    def look(self, details: Details, now: float) -> None:
        """Compare again."""
        about = _about(details, self._app)
        code = _code_of(about)
        self._code = self._code or code
        # Serve is replacing this frontend, or may be: the new settings are for the new replicas.
        if code != self._code or (code is None and about.get("status") != "RUNNING"):
            return
        before, self.refused = self.refused, self._refusals(details)
        if self.refused and (self.refused != before or now - self._said_at >= _AGAIN_S):
            self._said_at = now
            for said in self.refused:
                logger.error("Serve's settings have changed, and do not fit: %s", said)
        if before and not self.refused:
            logger.warning("Serve's settings are right again")

    async def status(self) -> dict[str, Any]:
        """Return the nodes of the cluster and of the frontends for `ray-slo status`, and the
        refused settings if there are any."""
        refused = {"refused_settings": self.refused} if self.refused else {}
        asked = asyncio.get_running_loop().run_in_executor(self._thread, usable_nodes)
        try:
            nodes = await asyncio.wait_for(asked, _ANSWER_S)
        except Exception as error:
            logger.info("the cluster's nodes cannot be read: %r", error)
            return refused
        return {"nodes": {"cluster": nodes, "frontends": self._frontend_nodes}, **refused}

    async def _read(self) -> Details:
        # A thread of its own: without a controller, the call does not end.
        asked = asyncio.get_running_loop().run_in_executor(self._thread, self._details)
        details = await asyncio.wait_for(asked, _ANSWER_S)
        frontend = _about(details, self._app).get("deployments", {}).get(self._names[0], {})
        nodes = [one.get("node_id") for one in frontend.get("replicas", ())]
        self._frontend_nodes = [node for node in nodes if node]  # one that starts has none yet
        return details

    def _refusals(self, details: Details) -> list[str]:
        return list(refusals(self._spec, details, self._app, *self._names))


def refusals(
    spec: AppSpec, details: Details, app: str, frontend: str, workers: Mapping[str, str]
) -> Iterator[str]:
    """Yield one sentence for every setting that the application cannot run well with.

    Args:
        details: what Serve's controller says of all applications.
        app: name of the application.
        frontend: name of the frontend's deployment.
        workers: names of the workers' deployments by kind.
    """
    about = _about(details, app)
    given = {one["name"]: one for one in _config_of(about).get("deployments") or ()}
    for name, kind in {frontend: None, **{name: kind for kind, name in workers.items()}}.items():
        deployment = about.get("deployments", {}).get(name)
        if deployment is None:
            continue
        options, said = deployment["deployment_config"], given.get(name, {})
        found = [*_of_both(options, is_frontend=kind is None)]
        if kind is None:
            target = deployment.get("target_num_replicas") or 0
            found += _of_frontend(spec, options, said, target)
        else:
            found += _of_worker(spec.workers[kind].replica_bounds, options, said)
        yield from (f"deployments: {name}: {what}" for what in found)
    yield from _of_application(spec, about)
    yield from _of_proxies(spec, details, about, frontend)


def _of_both(options: Details, is_frontend: bool) -> Iterator[str]:
    most = options.get("max_ongoing_requests", UNBOUNDED)
    if most < UNBOUNDED:
        why = NOT_OURS["max_ongoing_requests"]
        if is_frontend:
            why = "Serve holds the rest, and sees no deadline; write max_queued_requests in args"
        yield f"max_ongoing_requests is {most}; leave it out: {why}"
    if (most := options.get("max_queued_requests", -1)) != -1:
        yield (
            f"max_queued_requests is {most}; leave it out: nothing waits in Serve's own queue; "
            f"write max_queued_requests: {most} in args"
        )
    pressure = options.get("backpressure_config") or {}
    if pressure.get("status_code", 503) != 503 or pressure.get("retry_after_s") is not None:
        why = NOT_OURS["backpressure_config"]
        yield f"backpressure_config is {quoted(pressure)}; {why}"
    if (gang := options.get("gang_scheduling_config")) is not None:
        yield f"gang_scheduling_config is {quoted(gang)}; {NOT_OURS['gang_scheduling_config']}"


def _of_frontend(spec: AppSpec, options: Details, given: Details, target: int) -> Iterator[str]:
    if options.get("autoscaling_config") is not None:
        what = _autoscaling_said(options, given)
        yield f"{what}; the number of frontends is fixed: write num_frontends in args instead"
    elif spec.embedded and target > 1:
        yield (
            f"num_replicas is {target}; the scheduler is in the frontend, and two schedulers would "
            "give one worker two batches at once: leave it out, and write num_frontends: "
            f"{target} in args; then the scheduler has a process of its own"
        )
    if spec.embedded and (surge := options.get("max_surge_percent") or 0):
        yield (
            f"max_surge_percent is {surge}; the scheduler is in the frontend, and during an update "
            "two would give one worker two batches at once: leave it out, or write num_frontends: "
            "2 in args"
        )
    if "ray_actor_options" in given and not keeps_one_loop(options.get("ray_actor_options") or {}):
        yield (
            f"ray_actor_options is {quoted(given['ray_actor_options'])}; it replaces options that "
            "a frontend needs: write frontend_actor_options in args instead"
        )


def _of_worker(bounds: tuple[int, int] | None, options: Details, given: Details) -> Iterator[str]:
    autoscaling = options.get("autoscaling_config")
    policy = (autoscaling or {}).get("policy") or {}
    here = "for these workers in args"
    if autoscaling is not None and _dotted(policy.get("policy_function")) != _POLICY:
        least, most = autoscaling.get("min_replicas"), autoscaling.get("max_replicas")
        yield (
            f"{_autoscaling_said(options, given)}; Serve sees no ongoing requests of workers, and "
            f"would stop busy ones: write min_replicas: {least} and max_replicas: {most} {here} "
            "instead; the planner follows the load"
        )
    elif autoscaling is None and bounds is not None and "autoscaling_config" in given:
        yield (
            f"autoscaling_config is {given['autoscaling_config']}; the planner decides from "
            f"{bounds[0]} to {bounds[1]} workers, and nothing would follow it: leave it out, or "
            f"leave out max_replicas {here}"
        )
    elif autoscaling is not None and isinstance(number := given.get("num_replicas"), int):
        yield (
            f"num_replicas is {number}; the planner decides the number of workers, so Serve "
            "ignores it: write num_replicas (at first), min_replicas and max_replicas "
            f"{here} instead"
        )
    router = (options.get("request_router_config") or {}).get("request_router_class")
    if router is not None and not is_router(_dotted(router)):
        yield (
            f"request_router_config has the class {quoted(router)}; leave it out: "
            f"{NOT_OURS['request_router_config']}"
        )


def _of_application(spec: AppSpec, about: Details) -> Iterator[str]:
    policy = _config_of(about).get("autoscaling_policy")
    if policy is not None:
        yield (
            f"autoscaling_policy is {quoted(policy)}; leave it out: the planner decides the number "
            "of workers; name one in args (`planner: auto`, another one, or your own as "
            "'module:Class')"
        )
    scaled = [kind for kind, worker in spec.workers.items() if worker.replica_bounds is not None]
    if about.get("external_scaler_enabled") and scaled:
        yield (
            "external_scaler_enabled is true; the planner scales the same workers "
            f"({', '.join(sorted(scaled))}): leave it out, or leave out max_replicas in args"
        )


def _of_proxies(spec: AppSpec, details: Details, about: Details, frontend: str) -> Iterator[str]:
    ingress = (about.get("deployment_topology") or {}).get("ingress_deployment")
    if ingress not in (None, frontend):  # a deployment of the user's owns the clients' requests
        return
    slo_s, name = max(
        (slo_s, tree.name) for tree in spec.trees.values() for slo_s in tree.slos_s.values()
    )
    doors = {"http_options": about.get("route_prefix"), "grpc_options": True}
    for options, is_open in doors.items():
        timeout_s = (details.get(options) or {}).get("request_timeout_s")
        if is_open and timeout_s and 0 < timeout_s < slo_s:
            yield (
                f"{options}: request_timeout_s is {timeout_s:g}, less than the SLO of {name!r}, "
                f"{slo_s:g} s; Serve would end requests that run in time: leave it out, as every "
                f"request has its deadline, or write at least {slo_s:g}"
            )


def _autoscaling_said(options: Details, given: Details) -> str:
    """The option by which the user gave Serve's autoscaling, with its value."""
    if given.get("num_replicas") == "auto":
        return "num_replicas is 'auto'"
    said = given.get("autoscaling_config")
    return f"autoscaling_config is {quoted(said or options['autoscaling_config'])}"


def _about(details: Details, app: str) -> Details:
    found: Details = details.get("applications", {}).get(app) or {}
    return found


def _config_of(about: Details) -> Details:
    """The application's part of Serve's config file; empty if there is none."""
    found: Details = about.get("deployed_app_config") or {}
    return found


def _code_of(about: Details) -> Any:
    """What decides whether Serve replaces replicas; None without a config file."""
    config = _config_of(about)
    return [config.get(name) for name in _CODE] if config else None


def _dotted(path: Any) -> str:
    return str(path).replace(":", ".")

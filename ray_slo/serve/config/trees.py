"""Trees of tasks for all that clients may ask for, made from users' models and pipelines."""

from __future__ import annotations

from collections.abc import Mapping

from ray_slo.core.trees import DEFAULT_CLASS, Tree, TreeTask
from ray_slo.serve.config.models import ModelConfig
from ray_slo.serve.config.pipeline import PipelineConfig
from ray_slo.serve.config.spec import variants_of


def trees_of(
    models: Mapping[str, ModelConfig],
    pipelines: Mapping[str, PipelineConfig],
    served: Mapping[str, ModelConfig],
) -> dict[str, Tree]:
    """A tree for every model and every pipeline.

    Args:
        models: models that clients may ask for.
        pipelines: pipelines; their tasks have the properties of the models that serve them.
        served: `models`, and tasks with their own code.
    """
    keys: dict[str, dict[str, str]] = {}  # by model and the variant's own name
    for key, ref in variants_of(served).items():
        keys.setdefault(ref.model, {})[ref.name] = key
    trees = {name: Tree.of_model(name, _slos_s(model)) for name, model in models.items()}
    for name, pipeline in pipelines.items():
        trees[name] = _tree(name, pipeline, keys)
    return trees


def _slos_s(said: ModelConfig | PipelineConfig) -> dict[str, float]:
    slos_ms = {DEFAULT_CLASS: said.latency_slo_ms, **said.slo_classes}
    return {name: slo_ms / 1e3 for name, slo_ms in slos_ms.items()}


def _tree(name: str, pipeline: PipelineConfig, keys: Mapping[str, Mapping[str, str]]) -> Tree:
    model_of = {task: said.model or task for task, said in pipeline.tasks.items()}
    tasks = []
    for task, parent in pipeline.parents.items():
        model = model_of[task]
        factors = pipeline.factors_of(task)
        by_key = {keys[model][variant]: made for variant, made in factors.items()}
        tasks.append(TreeTask(task, model, parent, by_key))
    measured = {
        tuple(keys[model_of[task]][variant] for task, variant in path): accuracy
        for path in pipeline.paths
        if (accuracy := pipeline.path_accuracies.get("/".join(v for _, v in path))) is not None
    }
    return Tree(name, tuple(tasks), _slos_s(pipeline), measured)

"""BERT from tiny to base as variants: classifiers of text pairs, with published accuracies.

    load("bert-mini", weights="/models/mnli")   # /models/mnli/bert-mini, by save_pretrained
    load("bert-mini", weights="none")           # random: the same cost, meaningless answers
    load("bert-mini")                           # the published encoder, an untrained classifier
    load("bert-mini", weights="local")          # the same, or an error if it is not downloaded

Without the argument `weights`, the environment variable RAY_SLO_WEIGHTS decides.

The networks are the BERT miniatures (Turc et al. 2019, "Well-Read Students Learn Better"). Only the
encoders are published; a classifier on top has to be fine-tuned on its task. The accuracies are
those after fine-tuning on MNLI (matched test set), from the GLUE table of the miniatures' model
card. BERT-base's is from Devlin et al. 2019, Table 1. RAMSIS' text task (EuroSys '24, §7) uses the
same networks. Loading needs transformers (`pip install 'ray-slo[text]'`); importing this module
does not.
"""

from __future__ import annotations

import json
import logging
import re
import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ray_slo.core.text import quoted
from ray_slo.models.devices import pick_device
from ray_slo.models.fetching import TIMEOUT_S
from ray_slo.models.lanes import Lane
from ray_slo.models.loading import (
    Source,
    checked_by,
    one_of,
    say,
    weights_source,
)
from ray_slo.models.running import How, OnRunner, Runner, Staged, parse_how
from ray_slo.models.ways import fit

if TYPE_CHECKING:
    import torch

LABELS = ("entailment", "neutral", "contradiction")  # in the order of GLUE
_JSON_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")
MAX_TOKENS = 128  # largest number of tokens in a pair, as in the miniatures' fine-tuning

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

EXAMPLE = (
    "The committee announced yesterday that the new hospital would be finished before the "
    "winter, although half of the money for it has not been found yet.",
    "The hospital has been paid for in full.",
)
"""A text pair of typical length, for measurements."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Size:
    """A network of the family; `accuracy` is published, in percent, on MNLI (matched)."""

    layers: int
    hidden: int
    accuracy: float

    @property
    def heads(self) -> int:
        return self.hidden // 64

    @property
    def checkpoint(self) -> str:
        """Name of the pre-trained encoder on the Hugging Face hub."""
        return f"google/bert_uncased_L-{self.layers}_H-{self.hidden}_A-{self.heads}"


FAMILY = {
    "bert-tiny": Size(2, 128, 70.2),
    "bert-mini": Size(4, 256, 74.8),
    "bert-small": Size(4, 512, 77.6),
    "bert-medium": Size(8, 512, 80.0),
    "bert-base": Size(12, 768, 84.6),
}


class TextAnswer(TypedDict):
    """The most likely label with its probability, and the probability of every label."""

    label: str
    confidence: float
    scores: dict[str, float]


@dataclass(frozen=True)
class PairClassifier(OnRunner):
    """A network with its tokenizer. It maps text pairs to answers.

    Attributes:
        runs: how the network is run, in words.
    """

    name: str
    runner: Runner
    tokenizer: Any
    labels: list[str]
    max_tokens: int = MAX_TOKENS
    runs: str = ""

    def stage(self, pairs: list[tuple[str, str]]) -> Staged:
        """Cut texts into tokens and copy these to the device. `__call__` takes the result."""
        return _stage(self.runner, self.tokenizer, self.max_tokens, pairs)

    def __call__(self, pairs: list[tuple[str, str]] | Staged) -> list[TextAnswer]:
        """Return one answer per pair, in the same order."""
        if not isinstance(pairs, Staged):
            if not pairs:
                return []
            pairs = self.stage(pairs)
        scores = self.runner(pairs, lambda output: output.softmax(1))
        answers: list[TextAnswer] = []
        for row in scores.tolist():
            by_label = dict(zip(self.labels, row, strict=True))
            best = max(by_label, key=by_label.__getitem__)
            answers.append({"label": best, "confidence": by_label[best], "scores": by_label})
        return answers


def _stage(runner: Runner, tokenizer: Any, max_tokens: int, pairs: list[tuple[str, str]]) -> Staged:
    first, second = zip(*pairs, strict=True)

    def make(lane: Lane) -> dict[str, torch.Tensor]:
        tokens = tokenizer(
            list(first),
            list(second),
            padding=True,
            truncation=True,
            max_length=max_tokens,
            return_tensors="pt",
        )
        return {name: lane.put(tensor) for name, tensor in tokens.items()}

    return runner.stage(make)


def accuracy(name: str) -> float:
    """Return the published accuracy on MNLI (matched), in percent. The module says its source.

    Raises:
        ValueError: the name is unknown.
    """
    return size(name).accuracy


def size(name: str) -> Size:
    """Return a network's dimensions.

    Raises:
        ValueError: the name is unknown. The message has the valid ones.
    """
    try:
        return FAMILY[name]
    except (KeyError, TypeError):
        raise one_of("name", name, list(FAMILY)) from None


def _weights_of(name: str, weights: object, *, anywhere: bool = False) -> Source:
    wanted = f"a folder that save_pretrained wrote, or that holds {name}"
    return weights_source(weights, wanted, anywhere=anywhere)


def _check(
    name: str,
    weights: str | Path | None = None,
    device: str = "auto",
    max_tokens: int = MAX_TOKENS,
    how: object = "auto",
    *_: Any,
    **__: Any,
) -> None:
    size(name)
    _weights_of(name, weights, anywhere=True)
    parse_how(how)


@checked_by(_check)
def load(
    name: str,
    weights: str | Path | None = None,
    device: str = "auto",
    max_tokens: int = MAX_TOKENS,
    how: str | Mapping[str, Any] | How = "auto",
) -> PairClassifier:
    """Load a BERT with a classifier on top.

    Args:
        name: one of `FAMILY`.
        weights: one of these words, or a path. Default: $RAY_SLO_WEIGHTS, otherwise "download".

            * "none": random weights, and a generated tokenizer. Both are the same in every process.
            * "local": the published encoder from Hugging Face's cache ($HF_HOME). Its classifier is
              untrained.
            * "download": as "local", and the encoder is downloaded once.
            * The path of a folder that `save_pretrained` wrote (network and tokenizer), or of its
              parent folder, where its name is `name`. The labels are those in its `config.json`.
        device: "auto", "cpu", "cuda", "cuda:1", …
        max_tokens: largest number of tokens in a pair. Longer pairs are cut.
        how: the way in which the network is run; see `ray_slo.models.vision.load`.

    Raises:
        ValueError: an argument is not valid, or the weights are of another network.
        RuntimeError: the download failed.
        ImportError: transformers is missing, or does not fit the installed torch.
    """
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 8:
        raise ValueError(f"max_tokens: got {quoted(max_tokens)}, wanted a whole number from 8")
    dimensions = size(name)
    source = _weights_of(name, weights)
    place = pick_device(device)
    import torch

    _need_transformers()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if source == "none":
            network, tokenizer = _random(dimensions)
            _log.warning("%s has random weights: its answers are meaningless", name)
        elif isinstance(source, Path):
            network, tokenizer = _from_folder(source, name, dimensions)
        else:
            network, tokenizer = _published(dimensions.checkpoint, source)
    config = network.config
    limit = min(max_tokens, config.max_position_embeddings)
    runner, runs = fit(
        network.eval(),
        place,
        lambda runner, size: _stage(runner, tokenizer, limit, [EXAMPLE] * size),
        how,
        plain=How(),
        fixed_shape=False,  # a batch is as long as its longest pair of texts
        call=lambda network, tokens: network(**tokens).logits,
    )
    _log.info("%s runs in %s", name, runs)
    labels = [config.id2label[index] for index in range(config.num_labels)]
    return PairClassifier(name, runner, tokenizer, labels, limit, runs)


def _need_transformers() -> None:
    try:
        from transformers import BertForSequenceClassification  # noqa: F401  (it loads lazily)
    # RuntimeError: the installed torchvision was built for another version of torch.
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"BERT needs transformers ({_first_sentence(error)}): pip install 'ray-slo[text]'"
        ) from error


def _labels() -> dict[str, Any]:
    return {
        "id2label": dict(enumerate(LABELS)),
        "label2id": {label: index for index, label in enumerate(LABELS)},
    }


def _random(dimensions: Size) -> tuple[Any, Any]:
    """Return a random network as large as the published one, and a tokenizer that needs no
    download."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    vocabulary = _vocabulary()
    pieces = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer(lowercase=True)
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces.post_processor = processors.BertProcessing(
        *((token, vocabulary[token]) for token in ("[SEP]", "[CLS]"))
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{token[1:-1].lower()}_token": token for token in _SPECIAL},
    )
    config = transformers.BertConfig(
        num_hidden_layers=dimensions.layers,
        hidden_size=dimensions.hidden,
        num_attention_heads=dimensions.heads,
        intermediate_size=4 * dimensions.hidden,
        **_labels(),
    )
    return transformers.BertForSequenceClassification(config), tokenizer


def _vocabulary() -> dict[str, int]:
    """Return a small WordPiece vocabulary: words of Python's `help()`, and their common parts.

    With it, English text has about 1.5 times as many tokens as with BERT's own vocabulary. The
    trainer of `tokenizers` is not used because it breaks ties at random: replicas would answer
    differently.
    """
    from pydoc_data.topics import topics

    words = sorted(set(re.findall("[a-z]+", " ".join(topics.values()).lower())))
    starts = Counter(word[:i] for word in words for i in range(2, len(word)))
    ends = Counter("##" + word[i:] for word in words for i in range(1, len(word) - 1))
    shared = sorted(piece for piece, uses in (starts + ends).items() if uses > 1)
    letters = string.printable.strip()
    pieces = [*_SPECIAL, *letters, *("##" + letter for letter in letters), *words, *shared]
    return {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}


def _from_folder(path: Path, name: str, dimensions: Size) -> tuple[Any, Any]:
    import transformers

    folder = path if (path / "config.json").is_file() else path / name
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"weights: {str(path)!r} holds neither config.json nor {name}/config.json; wanted a "
            "folder that save_pretrained wrote"
        )
    if not any((folder / file).is_file() for file in ("tokenizer.json", "vocab.txt")):
        raise ValueError(
            f"weights: {str(folder)!r} holds no tokenizer (tokenizer.json or vocab.txt); save the "
            "tokenizer there with save_pretrained"
        )
    for file in (folder / name for name in _JSON_FILES):
        _check_json(file)
    try:
        config = transformers.BertConfig.from_pretrained(folder, local_files_only=True)
        found = (config.num_hidden_layers, config.hidden_size)
        if found == (dimensions.layers, dimensions.hidden):
            return _pretrained(folder, local_files_only=True)
    except Exception as error:  # JSON, safetensors and torch each raise their own classes
        raise ValueError(
            f"weights: cannot read {str(folder)!r}: {_first_sentence(error)}"
        ) from error
    raise ValueError(
        f"weights: {str(folder)!r} holds {found[0]} layers of {found[1]}, but {name} has "
        f"{dimensions.layers} of {dimensions.hidden}"
    )


def _check_json(file: Path) -> None:
    """Check that a file is a JSON mapping. The error names the file, which transformers' own errors
    do not always do."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"weights: cannot read {str(file)!r}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"weights: {str(file)!r} must hold a mapping, got {quoted(found)}")


def _published(checkpoint: str, source: Source) -> tuple[Any, Any]:
    """Return the published network and its tokenizer from Hugging Face's cache. If they are not
    there and `source` is "download", download them first."""
    from huggingface_hub import constants, snapshot_download

    folder = Path(constants.HF_HUB_CACHE) / f"models--{checkpoint.replace('/', '--')}"
    try:
        # Load by the folder. For a name, transformers asks the hub even if the files are local.
        snapshot = snapshot_download(
            checkpoint, cache_dir=constants.HF_HUB_CACHE, local_files_only=True
        )
        return _pretrained(snapshot, local_files_only=True, **_labels())
    except Exception as error:  # JSON, safetensors and torch each raise their own classes
        if source == "local":
            is_there = folder.is_dir()
            why = f"cannot be read ({_first_sentence(error)})" if is_there else "is not there"
            raise ValueError(
                f"weights: got 'local', but {str(folder)!r} {why}; get {checkpoint} from the "
                f"Hugging Face hub, or {say(repr('download'))}"
            ) from error
    try:
        _reach(checkpoint)
        return _pretrained(checkpoint, **_labels())
    except OSError as error:
        raise RuntimeError(
            f"weights: cannot get {checkpoint} from the Hugging Face hub "
            f"({_first_sentence(error)}); copy {folder} from a machine that has it, or {say()}"
        ) from error


def _reach(checkpoint: str) -> None:
    """Check that the hub answers. Without a network, the hub's client would try for minutes.

    Raises:
        OSError: the hub does not answer now.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(checkpoint, "config.json"), timeout=TIMEOUT_S)
    except Exception as error:  # its class depends on the HTTP library of the client
        raise OSError(str(error) or type(error).__name__) from error


def _pretrained(where: str | Path, **options: Any) -> tuple[Any, Any]:
    import transformers

    network, info = transformers.BertForSequenceClassification.from_pretrained(
        where, output_loading_info=True, **options
    )
    if info["missing_keys"]:
        _log.warning(
            "%s has no trained %s: its answers are meaningless until it is fine-tuned; give "
            "weights: <path of a fine-tuned network>",
            where,
            " and ".join(sorted({key.partition(".")[0] for key in info["missing_keys"]})),
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        where, local_files_only=options.get("local_files_only", False)
    )
    return network, tokenizer


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an error's message. If it is a single word, as in a KeyError,
    add the name of the class."""
    said = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    return said if " " in said else f"{type(error).__name__}: {said}"

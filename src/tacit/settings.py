"""Everything that decides a training, as one value: from a TOML file, from flags, or from Python.

Sections with a `name` choose a class from a registry, and their other keys are that class's fields; so a new scorer or
loss brings its settings along. Plain dataclasses, because whatever trains has NumPy and torch alone. An unknown key is
an error that names the nearest one.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from tacit.errors import BadInput, BadValue, TacitError, excerpt
from tacit.examples import Sampling
from tacit.losses import LOSSES, REGULARISERS, Dura, KVsAll, Loss, NoRegulariser, Regulariser, SelfAdversarial
from tacit.models import SCORERS, Scorer
from tacit.models.bilinear import RESCAL
from tacit.models.translational import TransE
from tacit.negatives import NEGATIVES, Independent, Negatives
from tacit.optimizers import OPTIMIZERS, Adam, Optimizer
from tacit.privacy.privatizers import DEFAULT, PRIVATIZERS, Marginals, NoPrivacy, Privatizer, RepairedFLames, Sound

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
LARGEST = 1 << 48
DEEPEST = 8


@dataclass(frozen=True)
class Training(Sampling):
    """How long, and on what.

    epochs: how many times to go through the triples, at most. steps: at most so many steps. device: cpu, cuda, or auto
    for the GPU if there is one. kernel: auto for the fastest, or reference, compiled, numba, triton. decay: how the
    learning rate falls from epoch to epoch, to all but 0 in the last; it follows `epochs`, not `steps`. products: what
    matrix products multiply in on a GPU, tf32 for speed with 10 bits of mantissa (ranks are always made in float32).
    checkpoint_every: epochs between checkpoints; default: at each validation.
    """

    epochs: int = 200
    steps: int | None = None
    device: str = "auto"
    kernel: Literal["auto", "reference", "compiled", "numba", "triton"] = "auto"
    decay: Literal["none", "linear", "cosine"] = "none"
    products: Literal["float32", "tf32"] = "float32"
    checkpoint_every: int | None = None

    def pace(self, done: Any, total: int | None = None) -> Any:
        """What the learning rate is multiplied by in the epoch after so many, of `total` or of `epochs`."""
        share = np.minimum(done / (total or self.epochs), 1.0)
        return {"none": 0 * share + 1, "linear": 1 - share, "cosine": (1 + np.cos(np.pi * share)) / 2}[self.decay]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "steps", "checkpoint_every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise BadValue(f"{name} is at least 1, not {value}")


@dataclass(frozen=True)
class Evaluation:
    """every: epochs between validations. patience: validations without a better MRR before training stops.
    sides, ties: of validation and test. memory_mb: about how much memory ranking may take."""

    every: int = 10
    patience: int = 5
    sides: Literal["tails", "heads", "both"] = "both"
    ties: Literal["realistic", "optimistic", "pessimistic"] = "realistic"
    memory_mb: int = 1024

    def __post_init__(self) -> None:
        for name in ("every", "patience", "memory_mb"):
            if (value := getattr(self, name)) < 1:
                raise BadValue(f"{name} is at least 1, not {value}")


@dataclass(frozen=True)
class Settings:
    """Everything that decides a training. Equal settings, graph and number of threads on a CPU: equal bits."""

    name: str = "run"
    seed: int = 0
    dim: int = 128
    scorer: Scorer = field(default_factory=TransE)
    loss: Loss = field(default_factory=SelfAdversarial)
    negatives: Negatives = field(default_factory=Independent)
    regulariser: Regulariser = field(default_factory=NoRegulariser)
    optimizer: Optimizer = field(default_factory=Adam)
    privacy: Privatizer = field(default_factory=NoPrivacy)
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 64:
            raise BadValue(f"seed is in [0, 2**64), not {self.seed}")
        if self.dim < 1:
            raise BadValue(f"dim is at least 1, not {self.dim}")
        kind = _name_of(NEGATIVES, self.negatives)
        if self.loss.needs is not None and kind != self.loss.needs:
            raise BadValue(
                f'the {_name_of(LOSSES, self.loss)} loss needs negatives.name = "{self.loss.needs}", not "{kind}"'
            )
        if kind == "all" and self.loss.needs != "all":
            raise BadValue('negatives.name = "all" goes with the losses one-vs-all and k-vs-all')
        if isinstance(self.loss, KVsAll) and self.negatives.sides not in ("tails", "heads", "both"):
            raise BadValue("k-vs-all asks for tails, heads or both sides of every query: set negatives.sides so")
        if isinstance(self.loss, KVsAll) and self.training.subsampling:
            raise BadValue("subsampling weighs triples, and an example of k-vs-all is a query: use another loss")
        if not NAME.fullmatch(self.name):
            raise BadValue(f"a name has letters, digits, dots, dashes and underscores; not {excerpt(self.name)}")
        if isinstance(self.regulariser, Dura) and self.regulariser.weight:
            if self.scorer.geometry != "product":
                raise BadValue(f"dura is for scorers by products, not {_name_of(SCORERS, self.scorer)}")
            if isinstance(self.loss, KVsAll):
                raise BadValue("dura needs triples, and an example of k-vs-all is a query: use one-vs-all")
        if self.training.reciprocal and self.negatives.sides != "both":
            raise BadValue('training.reciprocal asks for both sides: set negatives.sides = "both"')
        if self.privacy.sound and self.privacy.trains and (reasons := self.refusals()):
            raise BadValue(f"this may not be done under privacy: {'; '.join(reasons)}")
        if isinstance(self.privacy, Sound) and self.privacy.adaptive and self.evaluation.every >= self.training.epochs:
            raise BadValue(
                "a schedule that follows a signal looks at it every evaluation.every epochs: set that below "
                f"training.epochs, which is {self.training.epochs}"
            )
        if isinstance(self.privacy, RepairedFLames) and (kind != "random-triples" or not self.loss.apart):
            raise BadValue(
                'repaired-flames protects positives alone: set negatives.name = "random-triples", and a loss that has '
                "a positive part (self-adversarial, logistic)"
            )
        if isinstance(self.privacy, Marginals) and self.privacy.vectors and self.training.reciprocal:
            raise BadValue("noisy counts as vectors have no inverse relations: set training.reciprocal = false")
        if isinstance(self.privacy, Marginals) and self.privacy.vectors and type(self.scorer) is not RESCAL:
            raise BadValue('noisy counts as vectors are rows of RESCAL: set scorer.name = "rescal"')

    def refusals(self) -> list[str]:
        """Why these settings may not be used under privacy, each in a sentence; none: they may."""
        found = [
            None if self.scorer.separable else "this scorer's examples depend on each other: use another scorer",
            "this scorer begins with statistics of the triples: use transe" if self.scorer.statistics else None,
            self.loss.refused,
            self.negatives.refusal(),
            self.regulariser.refused,
            self.optimizer.refused,
            self.training.refusal(),
        ]
        return [reason for reason in found if reason is not None]

    def json(self) -> dict[str, Any]:
        """All settings, every default written out, as `make` reads them."""
        made: dict[str, Any] = {"name": self.name, "seed": self.seed}
        for section, registry in REGISTRIES.items():
            chosen = getattr(self, section)
            made[section] = {"name": _name_of(registry, chosen)} | asdict(chosen)
        made["scorer"] = {"name": made["scorer"].pop("name"), "dim": self.dim} | made["scorer"]
        if isinstance(self.privacy, NoPrivacy):
            del made["privacy"]
        return made | {"training": asdict(self.training), "evaluation": asdict(self.evaluation)}

    @staticmethod
    def make(values: Mapping[str, Any]) -> Settings:
        """Settings from nested values, as a TOML file or `json` has them; what is left out has its default."""
        values = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
        _check_keys(values, [*SECTIONS, "name", "seed"], "")
        if isinstance(privacy := values.get("privacy"), dict) and privacy:
            privacy.setdefault("name", DEFAULT)
            if getattr(PRIVATIZERS.get(str(privacy["name"])), "sound", False):
                values = combine(PRIVATE_DEFAULTS, values)
        chosen: dict[str, Any] = {}
        for key, hint in (("name", str), ("seed", int)):
            if key in values:
                chosen[key] = _checked(values[key], hint, key)
        kind: Any
        for section in SECTIONS:
            given = values.get(section, {})
            if not isinstance(given, dict):
                raise BadInput(f"found {excerpt(repr(given))} as {section}; expected a section with keys of its own.")
            if section == "scorer" and "dim" in given:
                chosen["dim"] = _checked(given.pop("dim"), int, "scorer.dim")
            if section in REGISTRIES:
                default = next(f for f in fields(Settings) if f.name == section).default_factory
                assert default is not MISSING
                name = given.pop("name", _name_of(REGISTRIES[section], default()))
                kind = _chosen(REGISTRIES[section], name, section)
            else:
                kind = {"training": Training, "evaluation": Evaluation}[section]
            chosen[section] = _built(kind, given, section, extra=("name", "dim") if section == "scorer" else ("name",))
        try:
            return Settings(**chosen)
        except BadValue as error:
            raise BadInput(f"{error}.") from None


REGISTRIES: dict[str, dict[str, Any]] = {
    "scorer": SCORERS,
    "loss": LOSSES,
    "negatives": NEGATIVES,
    "regulariser": REGULARISERS,
    "optimizer": OPTIMIZERS,
    "privacy": PRIVATIZERS,
}
PRIVATE_DEFAULTS: dict[str, Any] = {"negatives": {"name": "pool", "scope": "vocabulary"}}
"""What is left out means this under privacy, where the usual negatives would tell of the triples."""
SECTIONS = (*REGISTRIES, "training", "evaluation")
FLAGS = {
    "name": "name",
    "seed": "seed",
    "scorer": "scorer.name",
    "dim": "scorer.dim",
    "loss": "loss.name",
    "negatives": "negatives.count",
    "optimizer": "optimizer.name",
    "learning_rate": "optimizer.learning_rate",
    "batch": "training.batch",
    "epochs": "training.epochs",
    "steps": "training.steps",
    "device": "training.device",
    "every": "evaluation.every",
    "patience": "evaluation.patience",
    "memory_mb": "evaluation.memory_mb",
    "privacy": "privacy.name",
    "epsilon": "privacy.epsilon",
    "delta": "privacy.delta",
}
"""The short names of flags and keyword arguments, and the keys they stand for."""


def combine(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values in which a later layer wins; keys may be dotted ("scorer.dim") and are nested then."""
    whole: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            *path, last = key.split(".")
            if len(path) > DEEPEST:
                raise BadInput(f"{excerpt(key)} is no setting: none is so deep.")
            place = whole
            for name in path:
                place = place.setdefault(name, {})
                if not isinstance(place, dict):
                    raise BadInput(f"{key!r} reaches into {name!r}, which has no keys of its own.")
            if isinstance(value, Mapping):
                if not isinstance(below := place.get(last, {}), dict):
                    raise BadInput(f"found {excerpt(repr(below))} as {last}; expected a section with keys of its own.")
                place[last] = combine(below, value)
            else:
                place[last] = value
    return whole


def from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Values by their short names, nested; None: not given."""
    _check_keys(flags, list(FLAGS), "")
    return combine({FLAGS[name]: value for name, value in flags.items() if value is not None})


def checked_section(kind: Any, given: Any, name: str) -> Any:
    """A section's values as an instance of its class; an unknown key is an error that names the nearest one."""
    if not isinstance(given, Mapping):
        raise BadInput(f"found {excerpt(repr(given))} as {name}; expected a section with keys of its own.")
    return _built(kind, given, name, extra=())


def plain_section(given: Any, name: str, known: Mapping[str, type]) -> dict[str, Any]:
    """A section that is no class's: its keys, and their types, which may be float for any number."""
    if not isinstance(given, Mapping):
        raise BadInput(f"[{name}] is a section with keys: {', '.join(known)}.")
    _check_keys(given, list(known), f"{name}.")
    for key, value in given.items():
        wanted: Any = (int, float) if known[key] is float else known[key]
        if not isinstance(value, wanted) or (isinstance(value, bool) and known[key] is not bool):
            raise BadInput(f"found {excerpt(repr(value))} as {name}.{key}; expected a {known[key].__name__}.")
        if key == "split" and not (len(value) == 3 and all(isinstance(share, int | float) for share in value)):
            raise BadInput(f"found {excerpt(repr(value))} as {name}.split; expected three shares.")
    return dict(given)


PARTITION: dict[str, type] = {"by": str, "parts": int, "split": list, "share": float, "known": int}
"""The keys of [partition]: how one graph becomes several parties'."""


def read_settings(path: Path) -> dict[str, Any]:
    """The nested values of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read as TOML: {error}.") from None


def to_toml(values: Mapping[str, Any]) -> str:
    """Nested values as a TOML file has them; None, which has no place in one, is left out."""
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping) and value is not None}
    lines = [f"{key} = {_toml_value(value)}\n" for key, value in plain.items()]
    lines += [f"\n[{key}]\n{to_toml(value)}" for key, value in values.items() if isinstance(value, Mapping)]
    return "".join(lines)


def _toml_value(value: Any) -> str:
    """As JSON has it, but for one character that TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


def parse_assignment(text: str) -> dict[str, Any]:
    """ "key=value" of --set, nested: the value as TOML has it, or as text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise TacitError(f"found {excerpt(text)}; expected key=value, such as scorer.norm=2.")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    return combine({key.strip(): parsed})


def _name_of(registry: Mapping[str, Any], value: Any) -> str:
    return next((name for name, kind in registry.items() if type(value) is kind), type(value).__name__)


def _chosen(registry: Mapping[str, Any], name: Any, section: str) -> Any:
    if not isinstance(name, str) or name not in registry:
        near = get_close_matches(str(name), list(registry), n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise BadInput(f"there is no {section} {excerpt(str(name))}.{guess} There are: {', '.join(registry)}.")
    return registry[name]


def _built(kind: Any, given: Mapping[str, Any], section: str, extra: tuple[str, ...]) -> Any:
    names = [f.name for f in fields(kind)]
    _check_keys(given, names, f"{section}.", extra)
    hints = get_type_hints(kind)
    values = {name: _checked(value, hints[name], f"{section}.{name}") for name, value in given.items()}
    try:
        return kind(**values)
    except BadValue as error:
        raise BadInput(f"{section}: {error}.") from None


def _check_keys(given: Mapping[str, Any], known: list[str], before: str, extra: tuple[str, ...] = ()) -> None:
    for key in given:
        if key not in known:
            near = get_close_matches(str(key), [*known, *extra], n=1)
            guess = f" Did you mean '{before}{near[0]}'?" if near else ""
            raise BadInput(f"there is no setting '{before}{key}'.{guess} There are: {', '.join([*extra, *known])}.")


def _checked(value: Any, hint: Any, key: str) -> Any:
    """The value if it is of the kind the field wants; an int is also a float."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        kinds = get_args(hint)
        if value is None and NoneType in kinds:
            return None
        return _checked(value, next(kind for kind in kinds if kind is not NoneType), key)
    if origin is Literal:
        if value not in get_args(hint) or isinstance(value, bool):
            raise BadInput(
                f"found {excerpt(repr(value))} as {key}; expected one of {', '.join(map(repr, get_args(hint)))}."
            )
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST:
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise BadInput(f"found {excerpt(repr(value))} as {key}; expected {KINDS[hint]}.")
    if (hint is float and not math.isfinite(value)) or (hint is int and key != "seed" and abs(value) >= LARGEST):
        raise BadInput(f"found {excerpt(repr(value))} as {key}; expected {KINDS[hint]} of a size that can be.")
    return value


KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}

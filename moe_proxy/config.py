"""Owns the settings of one run: the only reader of the environment and of the configuration file.

Strength, from strong to weak: a flag, an environment variable ``MOE_PROXY_*``, the TOML file, the default.
It never looks at the machine or at the model.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import platformdirs
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from moe_proxy.durations import parse_seconds
from moe_proxy.errors import ConfigError

APP = "moe-proxy"
DEFAULT_PORT = 11435
DEFAULT_CLASSIFIERS = "keyword,tfidf"
ENV_PREFIX = "MOE_PROXY_"
_CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"

# Several words: a list in the file, separated by commas in a variable.
Words = Annotated[tuple[str, ...], NoDecode]
# What writes llama-server's state, and harms nobody but whoever asked for it.
OPENABLE_ROUTES = frozenset({"/props", "/slots", "/lora-adapters"})
# Never repeated to anybody, not even to say what is wrong with it.
_SECRETS = frozenset({"api_key"})
# What a request is about is not for the configuration to change.
_NO_PARAMETERS = frozenset(
    {"model", "messages", "prompt", "input", "input_prefix", "input_suffix", "stream", "stream_options"}
)


def config_path() -> Path:
    """Where the configuration file lies unless ``MOE_PROXY_CONFIG`` names another."""
    named = os.environ.get(_CONFIG_VARIABLE)
    return Path(named) if named else platformdirs.user_config_path(APP) / "config.toml"


def _runtime_path() -> Path:
    """The session's runtime folder; where there is none (a service, a container), one of the user's own."""
    session = os.environ.get("XDG_RUNTIME_DIR")
    return Path(session) / APP if session else platformdirs.user_state_path(APP) / "run"


class Settings(BaseSettings):
    """Everything a run can be told. Frozen; sizes and times carry their unit in the name."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid"
    )

    model: Path | None = Field(
        None, description="GGUF file, REPO:QUANT of a downloaded model, or auto; none: the model that ships"
    )
    alias: str | None = Field(None, description="name of the model towards clients; none: the file's stem")
    aliases: Words = Field((), description="more names that mean the model")
    host: str = Field("127.0.0.1", description="address to listen on; the default also listens on ::1")
    insecure: bool = Field(False, description="listen on an address that others reach, without a key")
    api_key: SecretStr | None = Field(None, description="key that clients must send; no flag has it")
    api_key_file: Path | None = Field(None, description="file of such keys, one a line")
    allowed_hosts: Words = Field((), description="Host headers that are answered beside the local ones")
    allowed_origins: Words = Field((), description="origins of web pages that may ask, * stands for anything")
    port: int = Field(DEFAULT_PORT, ge=0, le=65535)
    gpu: bool = Field(False, description="compute on the NVIDIA GPU, with hot experts in its memory")
    vram_budget: str | None = Field(None, description="VRAM of the whole llama-server process: 8G, or bytes")
    pager: bool = Field(True, description="the expert pager; off is stock llama.cpp")
    ram_budget: str | None = Field(None, description="RAM for experts: 8G, 512M, 30%, or bytes")
    policy: Literal["posterior", "lru", "lfu", "static"] = Field(
        "posterior", description="which experts are kept: see docs/policies.md"
    )
    router_map: Path | None = Field(None, description="router map; none: the shipped map of this model")
    router_top_k: int | None = Field(None, ge=1, description="of the map, only each layer's busiest experts")
    prior_kappa: float = Field(8.0, gt=0, description="weight of the prior, in tokens")
    prior_min_distance: float = Field(0.05, ge=0, le=1, description="total variation that is worth a push")
    learn: bool = Field(True, description="let the router map follow the traffic")
    learn_half_life_tokens: float = Field(100_000, gt=0, description="of a domain's counts")
    learn_labels: bool = Field(False, description="let corrected labels teach the classifier")
    classifier: str = Field(
        DEFAULT_CLASSIFIERS, description="classifiers to ask, in order: see docs/classifiers.md"
    )
    keyword_threshold: float | None = Field(None, ge=0, le=1, description="confidence that stands alone")
    tfidf_threshold: float | None = Field(None, ge=0, le=1, description="confidence that stands alone")
    embedding_threshold: float | None = Field(None, ge=0, le=1, description="confidence that stands alone")
    pooled_threshold: float | None = Field(None, ge=0, le=1, description="of all together; below: abstain")
    tfidf_model: Path | None = Field(None, description="a retrained tfidf model; none: the shipped one")
    embedding_model: str | None = Field(
        None, description="folder or package of a sentence-transformers model"
    )
    context_length: int | None = Field(
        None, ge=16, description="tokens of context; none: 16384, or the model's own if that is less"
    )
    slots: int | None = Field(None, ge=1, le=256, description="requests computed at once")
    threads: int | None = Field(None, ge=1)
    thread_wait: Literal["spin", "sleep"] | None = Field(
        None, description="what threads do that wait for each other; none: llama.cpp's choice, spin"
    )
    calibrated: bool = Field(True, description="go by what moe-proxy tune found, where nothing else is set")
    engine: Path | None = Field(None, description="a llama-server to use instead of building one")
    unknown_model: Literal["strict", "any"] = Field("strict", description="Ollama routes: 404, or serve it")
    unknown_model_openai: Literal["strict", "any"] = Field("any", description="the same for all other routes")
    open_routes: Words = Field((), description="routes that write the engine's state: closed but for these")
    strip_parameters: Words = Field((), description="parameters that are taken out of every request")
    set_parameters: dict[str, Any] = Field({}, description="parameters that every request gets")
    ollama_defaults: bool = Field(False, description="Ollama's sampling defaults on its routes")
    keep_alive_policy: Literal["ignore-short", "obey"] = Field(
        "ignore-short", description="ignore-short: only keep_alive 0 without a prompt unloads; obey: timers"
    )
    keep_alive: str = Field("5m", description="with obey: how long the model stays after its last request")
    ready_timeout_s: float = Field(600.0, gt=0)
    hold_timeout_s: float = Field(600.0, gt=0, description="how long a request waits for the model to load")
    drain_s: float = Field(30.0, ge=0, description="how long running streams may go on after SIGTERM")
    max_in_flight: int = Field(512, ge=1, description="requests accepted at once, waiting ones included")
    access_log: Literal["off", "text", "json"] = Field("off", description="a line per request, on stdout")
    cache_dir: Path = Field(default_factory=lambda: platformdirs.user_cache_path(APP))
    models_dir: Path = Field(
        default_factory=lambda: platformdirs.user_data_path(APP) / "models", description="downloaded models"
    )
    state_dir: Path = Field(default_factory=lambda: platformdirs.user_state_path(APP))
    runtime_dir: Path = Field(default_factory=_runtime_path)

    @field_validator("keep_alive")
    @classmethod
    def _is_a_duration(cls, text: str) -> str:
        if parse_seconds(text) is None:
            raise ValueError("it is no duration such as 5m, 1h30m or -1")
        return text

    @field_validator(
        "aliases", "allowed_hosts", "allowed_origins", "open_routes", "strip_parameters", mode="before"
    )
    @classmethod
    def _separated(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @field_validator("open_routes")
    @classmethod
    def _openable(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        wrong = sorted(set(names) - OPENABLE_ROUTES)
        if wrong:
            raise ValueError(f"{wrong[0]} cannot be opened, only {', '.join(sorted(OPENABLE_ROUTES))}")
        return names

    @field_validator("strip_parameters", "set_parameters")
    @classmethod
    def _no_request(cls, names: Any) -> Any:
        wrong = sorted(_NO_PARAMETERS.intersection(names))
        if wrong:
            raise ValueError(f"{wrong[0]} is what a request is about, not a parameter of it")
        return names

    @field_validator(
        "model", "router_map", "engine", "cache_dir", "models_dir", "state_dir", "runtime_dir", "api_key_file"
    )
    @classmethod
    def _with_home(cls, path: Path | None) -> Path | None:
        """``~`` as the shell reads it: in a file or a variable nobody else does."""
        try:
            return path if path is None else path.expanduser()
        except RuntimeError as error:
            raise ValueError(f"{error}") from error

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, config_path())

    @property
    def keep_alive_s(self) -> float:
        """``keep_alive`` in seconds; negative: for ever."""
        seconds = parse_seconds(self.keep_alive)
        assert seconds is not None
        return seconds

    @property
    def origins(self) -> tuple[str, ...]:
        """``allowed_origins``, and those of OLLAMA_ORIGINS, which Ollama's users have set already."""
        named = os.environ.get("OLLAMA_ORIGINS", "")
        return (*self.allowed_origins, *filter(None, map(str.strip, named.split(","))))

    @property
    def thresholds(self) -> Mapping[str, float]:
        """Thresholds of the classifiers that were given, by name."""
        given = {
            "keyword": self.keyword_threshold,
            "tfidf": self.tfidf_threshold,
            "embedding": self.embedding_threshold,
            "pooled": self.pooled_threshold,
        }
        return {name: value for name, value in given.items() if value is not None}


Source = Literal["flag", "env", "file", "default"]


@dataclass(frozen=True)
class Origins:
    """Where each setting is given: ``all`` sources that give it, by setting, the strongest first.

    ``strangers`` are variables that look like settings and are none: a misspelt one changes nothing.
    """

    all: Mapping[str, tuple[Source, ...]]
    strangers: tuple[str, ...]

    def of(self, name: str) -> Source:
        """The source whose value of ``name`` counts; a table is added to by each of its sources."""
        return self.all[name][0]


def origins_of(flags: Mapping[str, Any]) -> Origins:
    """Which of ``flags`` (None means not given), environment and file give each setting.

    For settings that ``load_settings`` has read: it names what is wrong with them.
    """
    from_env = EnvSettingsSource(Settings)()
    from_file = {key.lower() for key in TomlConfigSettingsSource(Settings, config_path())()}
    given: dict[str, tuple[Source, ...]] = {}
    for name in Settings.model_fields:
        held = {"flag": flags.get(name) is not None, "env": name in from_env, "file": name in from_file}
        sources: tuple[Source, ...] = ("flag", "env", "file")
        given[name] = (*(source for source in sources if held[source]), "default")
    known = {f"{ENV_PREFIX}{name}".upper() for name in Settings.model_fields} | {_CONFIG_VARIABLE}
    strangers = (name for name in os.environ if name.upper().startswith(ENV_PREFIX))
    return Origins(given, tuple(sorted(name for name in strangers if name.upper() not in known)))


def nearest(name: str, known: Collection[str]) -> str | None:
    """The one of ``known`` that ``name`` was probably meant to be; None if none is like it."""
    return next(iter(get_close_matches(name.lower(), list(known), n=1)), None)


def load_settings(flags: Mapping[str, Any]) -> Settings:
    """Settings from ``flags`` (None means not given), environment and file.

    Raises ConfigError naming the option and its value.
    """
    if os.environ.get(_CONFIG_VARIABLE) and (config_path().is_dir() or not config_path().exists()):
        raise ConfigError(
            f"MOE_PROXY_CONFIG names {config_path()}, which is no file", "correct it, or unset it"
        )
    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            meant = nearest(name, Settings.model_fields)
            cure = f"did you mean {meant!r}?" if meant else "remove it, or see docs/config.md"
            raise ConfigError(f"unknown setting {name!r} in {config_path()}", cure) from error
        secret = name in _SECRETS
        value = "" if secret else f" = {first['input']!r}"
        flag = "" if secret else f"--{name.replace('_', '-')}, "
        raise ConfigError(
            f"setting {name}{value}: {first['msg'].lower()}",
            f"set it with {flag}MOE_PROXY_{name.upper()} or in {config_path()}",
        ) from (None if secret else error)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {config_path()}: {error}", "correct the file or move it away"
        ) from error

"""Owns the exception tree. Each error knows its HTTP status, OpenAI ``type`` and exit code.

MoeProxyError
├── UsageError            the caller asked for something that cannot be      exit 2, 400
│   ├── ConfigError       an option, environment variable or file is wrong
│   ├── ModelFileError    the model file cannot be used
│   │   ├── NotGgufError      no GGUF magic, or an unknown version
│   │   ├── TruncatedError    shorter than its own header says
│   │   ├── ShardMissingError one file of a split model is not there
│   │   └── NotMoeError       no expert tensors
│   └── RouterMapError    malformed map, or the map of another model
├── RequestError          the HTTP request is wrong                          exit 2, 400
│   ├── UnauthorizedError no API key, or a wrong one                                 401
│   ├── ForbiddenError    Host, Origin or target is not allowed                      403
│   ├── NotFoundError     no such route or file                                      404
│   │   └── ModelNotFoundError
│   ├── WrongMethodError  the route is there, and takes other methods                405
│   ├── BodyStalledError                                                             408
│   ├── BodyTooLargeError                                                            413
│   └── UnsupportedError  understood, and not offered                                501
├── BusyError             queue full; try again later                        exit 1, 429 (Ollama form: 503)
├── EngineError           llama-server or its build                          exit 1, 503
│   ├── BuildError        source, patches, compiler, disk
│   ├── EngineStartError  it did not become ready
│   ├── EngineGoneError   it died, or the connection to it broke                     502
│   └── ControlError      the pager refused a control call                           502
├── DownloadError         a model cannot be fetched from a hub              exit 1, 502
└── NotRunningError       there is no proxy to talk to                       exit 1, 503
"""

from __future__ import annotations


class MoeProxyError(Exception):
    """Base of the tree. ``message`` says what is wrong, with which value; ``hint`` what to do about it."""

    http_status = 500
    openai_type = "server_error"
    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}: {self.hint}" if self.hint else self.message


class UsageError(MoeProxyError):
    """The caller asked for something that cannot be."""

    http_status = 400
    openai_type = "invalid_request_error"
    exit_code = 2


class ConfigError(UsageError):
    """An option, environment variable or file is wrong."""


class ModelFileError(UsageError):
    """The model file cannot be used."""


class NotGgufError(ModelFileError):
    """No GGUF magic, or a version this program does not know."""


class TruncatedError(ModelFileError):
    """The file is shorter than its own header says."""


class ShardMissingError(ModelFileError):
    """One file of a split model is not there."""


class NotMoeError(ModelFileError):
    """The model has no expert tensors."""


class RouterMapError(UsageError):
    """A router map is malformed, or belongs to another model."""


class RequestError(MoeProxyError):
    """The HTTP request is wrong."""

    http_status = 400
    openai_type = "invalid_request_error"
    exit_code = 2


class UnauthorizedError(RequestError):
    """An API key is needed, and none or a wrong one came."""

    http_status = 401
    openai_type = "authentication_error"


class ForbiddenError(RequestError):
    """Host, Origin or request target is not allowed."""

    http_status = 403
    openai_type = "permission_error"


class NotFoundError(RequestError):
    """There is no such route, or nothing behind it."""

    http_status = 404
    openai_type = "not_found_error"


class ModelNotFoundError(NotFoundError):
    """No model of that name is served."""


class WrongMethodError(RequestError):
    """The route is there, and takes other methods."""

    http_status = 405


class BodyStalledError(RequestError):
    """The client stopped sending in the middle of the request body."""

    http_status = 408


class BodyTooLargeError(RequestError):
    """The request body is over the limit."""

    http_status = 413


class UnsupportedError(RequestError):
    """Understood, and not offered."""

    http_status = 501
    openai_type = "not_supported_error"


class BusyError(MoeProxyError):
    """The queue is full; the caller should try again after ``retry_after_s``."""

    http_status = 429
    openai_type = "rate_limit_error"

    def __init__(self, message: str, hint: str = "", retry_after_s: int = 1) -> None:
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s


class EngineError(MoeProxyError):
    """llama-server, or its build."""

    http_status = 503
    openai_type = "unavailable_error"


class BuildError(EngineError):
    """Source, patches, compiler or disk."""


class EngineStartError(EngineError):
    """llama-server did not become ready."""


class EngineGoneError(EngineError):
    """llama-server died, or the connection to it broke."""

    http_status = 502


class ControlError(EngineError):
    """The pager refused a control call."""

    http_status = 502


class DownloadError(MoeProxyError):
    """A model cannot be fetched from a hub."""

    http_status = 502
    openai_type = "unavailable_error"


class NotRunningError(MoeProxyError):
    """There is no proxy to talk to."""

    http_status = 503
    openai_type = "unavailable_error"

"""The models of one server, by the names that clients send in the field `model`."""

import time
from collections.abc import Sequence

from cutaway.errors import InputError
from cutaway.serve.errors import APIError
from cutaway.serve.metrics import ServerMetrics
from cutaway.serve.openai.serving_engine import ServingEngine
from cutaway.serve.request_context import current_request


class ServedModels:
    """Serving engines by served name. The name of an adapter belongs to the engine of its base model."""

    def __init__(self, engines: Sequence[ServingEngine], metrics: ServerMetrics) -> None:
        """`metrics`: metrics of the server, which all engines share."""
        self.engines, self.metrics, self.created = list(engines), metrics, int(time.time())
        self.by_name: dict[str, ServingEngine] = {}
        for engine in self.engines:
            for name in engine.adapters:
                if name in self.by_name:
                    raise InputError(
                        f"two models or adapters have the same name '{name}'; pass --served-model-name for each model,"
                        " or another NAME in --adapter NAME=DIR"
                    )
                self.by_name[name] = engine

    def find(self, model: str | None) -> ServingEngine:
        """Return the engine of a model or an adapter; without a name, of the first model.

        Raise an error with status 404 if there is none, or if the client's API key does not allow it.
        """
        request = current_request()
        name = self.engines[0].served_model_name if model is None else model
        request.set_model(name)
        if name not in self.by_name or not request.allows_model(name):
            allowed = self._allowed_names()
            hint = f"use {' or '.join(allowed)}" if allowed else "the API key allows none of its models"
            raise APIError(
                404, f"the model does not exist on this server; {hint}", param="model", code="model_not_found"
            )
        return self.by_name[name]

    def _allowed_names(self) -> list[str]:
        return [name for name in self.by_name if current_request().allows_model(name)]

    def cards(self) -> list[dict[str, object]]:
        """Model objects of the OpenAI API, for the models and adapters that the client may use."""
        return [self.card(name) for name in self._allowed_names()]

    def card(self, name: str) -> dict[str, object]:
        engine = self.by_name[name]
        parent = {} if name == engine.served_model_name else {"parent": engine.served_model_name}
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "cutaway",
            "max_model_len": engine.max_model_len,
        } | parent

    @property
    def is_healthy(self) -> bool:
        return all(engine.is_healthy for engine in self.engines)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

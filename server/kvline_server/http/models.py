"""The one model as /v1/models describes it."""

from __future__ import annotations

from typing import Any

from kvline_server.http.service import Service

# As vLLM has them; clients of its cards expect the list.
PERMISSIONS = {
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}


def card(service: Service) -> dict[str, Any]:
    """`root` names the tokenizer to benchmarks; `parent` would be an adapter's base."""
    name, created = service.limits.served_name, service.started
    permission = {"id": f"modelperm-{name}", "object": "model_permission", "created": created}
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "kvline",
        "root": service.root or name,
        "parent": None,
        "max_model_len": service.limits.max_model_len,
        "permission": [permission | PERMISSIONS],
    }

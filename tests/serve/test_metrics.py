"""Metrics of several models in one registry, in the Prometheus text format."""

from prometheus_client.parser import text_string_to_metric_families

from cutaway.serve.metrics import ModelMetrics, ServerMetrics


def test_models_share_metrics_with_a_label() -> None:
    server = ServerMetrics()
    for name, count in (("a", 3), ('b "quoted"\n', 5)):
        metrics = ModelMetrics(server, name)
        metrics.prompt_tokens.inc(count)
        metrics.record_finished("stop")
        metrics.time_to_first_token.observe(0.02)
        metrics.add_gauge("kv_cache_usage_ratio", "Fraction of the KV cache in use.", lambda count=count: count / 10)
        metrics.add_counter("prefix_cache_hits", "Tokens found in the prefix cache.", lambda count=count: count * 2)
    server.record_response("/v1/models", 200, 0.001)
    families = {each.name: each for each in text_string_to_metric_families(server.render().decode())}

    def values(name: str, suffix: str = "") -> dict[str, float]:
        samples = families[name].samples
        return {each.labels["model_name"]: each.value for each in samples if each.name == name + suffix}

    assert values("cutaway_prompt_tokens", "_total") == {"a": 3, 'b "quoted"\n': 5}
    assert values("cutaway_prefix_cache_hits", "_total") == {"a": 6, 'b "quoted"\n': 10}
    assert values("cutaway_kv_cache_usage_ratio") == {"a": 0.3, 'b "quoted"\n': 0.5}
    assert values("cutaway_time_to_first_token_seconds", "_count") == {"a": 1, 'b "quoted"\n': 1}
    assert {name: families[f"cutaway_{name}"].type for name in ("prefix_cache_hits", "kv_cache_usage_ratio")} == {
        "prefix_cache_hits": "counter",
        "kv_cache_usage_ratio": "gauge",
    }
    assert all(each.documentation for each in families.values())

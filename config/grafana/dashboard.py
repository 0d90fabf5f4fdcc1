"""Writes gateway.json, the dashboard: `make dashboards`. Each panel's description is the question that it answers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from grafana_foundation_sdk.builders.common import VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

FILE = Path(__file__).with_name("gateway.json")
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
PANELS_IN_A_ROW = 3
WIDTH, HEIGHT = 24 // PANELS_IN_A_ROW, 8
RATE = "$__rate_interval"
REFUSED = "queue_full|queue_timeout|deadline_exceeded|rate_limited|memory_full|out_of_descriptors|draining"


@dataclass(frozen=True)
class Panel:
    """One graph: expressions by the legend of their series."""

    title: str
    question: str
    unit: str
    series: dict[str, str] = field(default_factory=dict)


def chosen(name: str, *labels: str, more: str = "") -> str:
    """The series of a metric that the variables of the dashboard select by these labels."""
    selected = [f'{label}=~"${label}"' for label in ("instance", *labels)]
    return f"{name}{{{', '.join([*selected, *([more] if more else [])])}}}"


def rate(by: str, name: str, *labels: str, more: str = "") -> str:
    """Per second, summed by these labels; by none, of all together."""
    return f"sum by ({by}) (rate({chosen(name, *labels, more=more)}[{RATE}]))"


def increase(name: str, *labels: str) -> str:
    """How often in the time of a point of the graph."""
    return f"increase({chosen(name, *labels)}[{RATE}])"


def of_gateways(expression: str) -> str:
    """Without engines and others, whose processes are measured under the same names."""
    return f"{expression} and on (instance) gateway_build_info"


def quantiles(name: str, *labels: str, by: str = "", more: str = "") -> dict[str, str]:
    """Median, p95 and p99 of a histogram."""
    group, suffix = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    buckets = rate(group, f"{name}_bucket", *labels, more=more)
    return {f"p{share}{suffix}": f"histogram_quantile({share / 100}, {buckets})" for share in (50, 95, 99)}


NOT_UP = chosen("gateway_backend_state", "backend", more='state!="up"') + " == 1"
LIMIT = chosen("gateway_backend_in_flight_limit", "backend")
REQUESTS = "gateway_requests_total"
FAILURES = rate("", REQUESTS, "model", more='outcome=~"backend_error|interrupted|no_backend|internal_error"')
HITS = "gateway_prefix_hit_tokens_total"
ROWS: dict[str, list[Panel]] = {
    "Traffic": [
        Panel(
            "Requests",
            "How many requests end per second, and how?",
            "reqps",
            {"{{outcome}}": rate("outcome", REQUESTS, "model")},
        ),
        Panel(
            "Requests by model and endpoint",
            "What is the gateway used for?",
            "reqps",
            {"{{model}} {{endpoint}}": rate("model, endpoint", REQUESTS, "model")},
        ),
        Panel(
            "Tokens",
            "How many tokens go in and out per second?",
            "short",
            {
                "prompt {{model}}": rate("model", "gateway_prompt_tokens_total", "model"),
                "output {{model}}": rate("model", "gateway_completion_tokens_total", "model"),
            },
        ),
    ],
    "Latency": [
        Panel(
            "Time to first token",
            "How long until a stream begins, from the end of its request, with the time in the queue?",
            "s",
            quantiles("gateway_time_to_first_token_seconds", "model"),
        ),
        Panel(
            "Time per output token",
            "How fast do tokens follow, as a mean of each stream?",
            "s",
            quantiles("gateway_time_per_output_token_seconds", "model"),
        ),
        Panel(
            "Duration",
            "How long do requests take from end to end?",
            "s",
            quantiles("gateway_request_duration_seconds", "model"),
        ),
    ],
    "Queue and refusals": [
        Panel(
            "Requests in the queue",
            "How many requests wait, for which model?",
            "short",
            {"{{model}}": f"sum by (model) ({chosen('gateway_queued_requests', 'model')})"},
        ),
        Panel(
            "Time in the queue",
            "How long do interactive and batch requests wait?",
            "s",
            quantiles("gateway_queue_wait_seconds", "model", by="class"),
        ),
        Panel(
            "Refusals",
            "Which requests are refused for lack of capacity or by a key's limits?",
            "reqps",
            {"{{outcome}}": rate("outcome", REQUESTS, more=f'outcome=~"{REFUSED}"')},
        ),
    ],
    "Engines": [
        Panel(
            "Slots in use",
            "How full is each backend? 1 = at its limit.",
            "percentunit",
            {"{{backend}}": f"{chosen('gateway_backend_in_flight', 'backend')} / {LIMIT}"},
        ),
        Panel(
            "Limit of sequences",
            "What may run on each backend, after slow starts and adaptive limits?",
            "short",
            {"{{backend}}": LIMIT},
        ),
        Panel(
            "Reported by engines",
            "What do engines say of themselves? Waiting requests mean that the limit is too high.",
            "short",
            {
                "running {{backend}}": chosen("gateway_backend_reported_running", "backend"),
                "waiting {{backend}}": chosen("gateway_backend_reported_waiting", "backend"),
            },
        ),
        Panel(
            "KV cache",
            "How much KV cache is reserved by the gateway, and used by the engine's own report?",
            "percentunit",
            {
                "reserved {{backend}}": f"{chosen('gateway_backend_kv_tokens_reserved', 'backend')}"
                f" / ({chosen('gateway_backend_kv_tokens_limit', 'backend')} > 0)",
                "used {{backend}}": chosen("gateway_backend_reported_kv_usage", "backend"),
            },
        ),
        Panel(
            "Prefix hit rate",
            "Which share of the prompts' tokens is found in KV caches, as predicted and as reported?",
            "percentunit",
            {"{{kind}}": f"{rate('kind', HITS)} / on () group_left () {rate('', 'gateway_prompt_tokens_total')}"},
        ),
        Panel(
            "Prefix hits by backend",
            "Does each backend hold what the gateway expects?",
            "short",
            {"{{kind}} {{backend}}": rate("kind, backend", HITS, "backend")},
        ),
    ],
    "Errors and ejections": [
        Panel(
            "Share of failed requests",
            "How many requests fail because of backends or of the gateway?",
            "percentunit",
            {"failed": f"({FAILURES} or vector(0)) / {rate('', REQUESTS, 'model')}"},
        ),
        Panel(
            "State of backends",
            "Which backend was down, ejected or draining, and when?",
            "short",
            {"{{backend}} {{state}}": NOT_UP},
        ),
        Panel(
            "Failed attempts",
            "Which backends fail requests, and how? Retries hide most of it from clients.",
            "reqps",
            {
                "{{backend}} {{result}}": rate(
                    "backend, result", "gateway_upstream_attempts_total", "backend", more='result!="ok"'
                )
            },
        ),
        Panel(
            "Ejections",
            "How often is a backend taken out because its requests fail?",
            "short",
            {"{{backend}}": increase("gateway_backend_ejections_total", "backend")},
        ),
        Panel(
            "Failed probes",
            "Why can a backend not be reached?",
            "short",
            {"{{backend}} {{reason}}": chosen("gateway_backend_unreachable", "backend")},
        ),
        Panel(
            "Adaptive limits",
            "Which limits were changed, and why?",
            "short",
            {"{{backend}} {{reason}}": increase("gateway_limit_moves_total", "backend")},
        ),
    ],
    "Gateway process": [
        Panel(
            "CPU",
            "How much of its one core does each gateway use?",
            "percentunit",
            {"{{instance}}": of_gateways(f"rate({chosen('process_cpu_seconds_total')}[{RATE}])")},
        ),
        Panel(
            "Event loop lag",
            "Is the process late? All streams are late by as much.",
            "s",
            quantiles("gateway_event_loop_lag_seconds", by="instance"),
        ),
        Panel(
            "Memory",
            "How much memory does it use, and how much of it do requests hold?",
            "bytes",
            {
                "resident {{instance}}": of_gateways(chosen("process_resident_memory_bytes")),
                "requests {{instance}}": chosen("gateway_held_bytes"),
                "cached embeddings {{instance}}": chosen("gateway_embedding_cache_bytes"),
            },
        ),
        Panel(
            "File descriptors",
            "How many connections and files are open, of the most allowed?",
            "percentunit",
            {"{{instance}}": of_gateways(f"{chosen('process_open_fds')} / {chosen('process_max_fds')}")},
        ),
        Panel(
            "Dropped log lines",
            "Are lines of the logs lost?",
            "short",
            {
                "access log {{instance}}": increase("gateway_access_log_dropped_lines_total"),
                "log {{instance}}": increase("gateway_log_dropped_lines_total"),
            },
        ),
        Panel(
            "Versions",
            "Which versions run?",
            "short",
            {"{{instance}} {{version}} {{build}} Python {{python}}": chosen("gateway_build_info")},
        ),
    ],
}


def expressions() -> Iterator[tuple[str, str]]:
    """Every expression, with the title of its panel."""
    for panels in ROWS.values():
        for panel in panels:
            for expression in panel.series.values():
                yield panel.title, expression


def variables() -> Iterator[QueryVariable]:
    """What may be selected: one, several or all."""
    for name, metric in (
        ("instance", "gateway_build_info"),
        ("model", "gateway_requests_total"),
        ("backend", "gateway_backend_up"),
    ):
        made = QueryVariable(name).datasource(SOURCE).query(f"label_values({metric}, {name})")
        yield made.multi(True).include_all(True).all_value(".*").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def graph(panel: Panel) -> TimeSeries:
    """A panel of the dashboard; Grafana places it."""
    legend = VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    made = TimeSeries().title(panel.title).description(panel.question).unit(panel.unit).datasource(SOURCE).min(0)
    made = made.legend(legend.show_legend(True)).fill_opacity(10).span(WIDTH).height(HEIGHT)
    for number, (name, expression) in enumerate(panel.series.items()):
        made = made.with_target(Dataquery().expr(expression).legend_format(name).ref_id(chr(ord("A") + number)))
    return made


def document() -> str:
    """The file as Grafana imports it."""
    made = Dashboard("vLLM gateway").uid("vllm-batching-gateway").tags(["vllm", "gateway"]).refresh("30s")
    made = (
        made.time("now-1h", "now")
        .timezone("browser")
        .with_variable(DatasourceVariable("datasource").type("prometheus"))
    )
    for variable in variables():
        made = made.with_variable(variable)
    for title, panels in ROWS.items():
        made = made.with_row(Row(title))
        for panel in panels:
            made = made.with_panel(graph(panel))
    text = JSONEncoder(sort_keys=True, indent=1).encode(made.build())
    return json.dumps(json.loads(text), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")

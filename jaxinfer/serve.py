"""`python -m jaxinfer.serve`: the OpenAI-compatible HTTP server."""

import sys
from collections.abc import Callable

from absl import app, flags

from jaxinfer.engine.engine import Engine
from jaxinfer.flags import define_engine_flags, engine_options_from_flags, parse_flags
from jaxinfer.http.server import bind, run_server
from jaxinfer.http.settings import ServerSettings

FLAGS = flags.FLAGS


def _define_flags() -> None:
    define_engine_flags()
    flags.DEFINE_string("host", ServerSettings.host, "Address to listen on.")
    flags.DEFINE_integer("port", ServerSettings.port, "Port to listen on; 0 takes a free one.")
    flags.DEFINE_string(
        "api_key", None, "Key that clients must send (Authorization: Bearer KEY). Default: none is asked for."
    )
    flags.DEFINE_string("served_model_name", None, "Name of the model towards clients. Default: the model's own.")
    flags.DEFINE_float("max_body_mb", ServerSettings.max_body_mb, "Largest request body, in MiB.")
    flags.DEFINE_float(
        "drain_timeout",
        ServerSettings.drain_timeout,
        "Seconds that running requests have to finish after SIGTERM or SIGINT.",
    )


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code: 0 after a signal, 1 if the server cannot start."""
    if len(arguments) > 1:
        raise app.UsageError(f"expected flags only, got {arguments[1:]}")
    try:
        options = engine_options_from_flags()
        settings = ServerSettings(
            host=FLAGS.host,
            port=FLAGS.port,
            api_key=FLAGS.api_key,
            served_model_name=FLAGS.served_model_name,
            max_body_mb=FLAGS.max_body_mb,
            drain_timeout=FLAGS.drain_timeout,
        )
        listener = bind(settings.host, settings.port)
    except (ValueError, OSError) as error:
        print(f"jaxinfer.serve: {error}", file=sys.stderr)
        return 1

    def build(on_progress: Callable[[str], None]) -> Engine:
        from jaxinfer.build import build_engine  # loads JAX, which takes seconds: after the port is open

        return build_engine(options, on_progress)

    return run_server(settings, listener, build)


if __name__ == "__main__":
    _define_flags()
    app.run(main, flags_parser=parse_flags)

"""serve: answer observations over HTTP with an exported policy."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ml_pipeline.commands._arguments import add_shared, integer
from ml_pipeline.extras import import_extra

HELP = "answer observations over HTTP with an exported policy"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="file that export wrote")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    parser.add_argument(
        "--port", type=integer(0, 65_535), default=8321, help="default: 8321; 0: any free port"
    )
    parser.add_argument(
        "--max-batch",
        type=integer(1),
        default=64,
        metavar="N",
        help="most observations in one call of the policy; default: 64",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of this server in the Host header of requests; repeat for more",
    )
    add_shared(parser, "--trust")


def run(options: Namespace) -> None:
    for each in ("uvicorn", "httptools"):
        import_extra(each, needed_by="serve")
    from ml_pipeline.deploy.exported import ExportedPolicy
    from ml_pipeline.deploy.serve import PolicyServer, serve

    server = PolicyServer(
        ExportedPolicy.load(options.file, trust=options.trust),
        host=options.host,
        port=options.port,
        max_batch=options.max_batch,
        allow_hosts=options.allow_host,
    )
    serve(server)

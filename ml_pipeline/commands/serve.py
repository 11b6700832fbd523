"""serve: answer observations over HTTP with an exported policy."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ml_pipeline.commands._arguments import add_shared, integer
from ml_pipeline.errors import UserError
from ml_pipeline.extras import import_extra
from ml_pipeline.foreign import read_regular

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
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with a token that requests must send as Authorization: Bearer TOKEN",
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
        token="" if options.token_file is None else _read_token(options.token_file),
    )
    serve(server)


def _read_token(path: Path) -> str:
    try:
        token = read_regular(path, most_bytes=4_096).decode("ascii").strip()
    except OSError as error:
        raise UserError(f"--token-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--token-file {path}: use ASCII characters only") from error
    if not token or not token.isprintable():
        raise UserError(f"--token-file {path}: must have one line, such as 32 random characters")
    return token

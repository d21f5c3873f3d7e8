"""Adding up what several processes tell, and asking them."""

import asyncio

from quire.entrypoints.http.siblings import Siblings, merge_metrics

OWN = b"""# HELP quire:tokens_total Tokens.
# TYPE quire:tokens_total counter
quire:tokens_total{model_name="a b"} 3.0
quire:running{model_name="a b"} 0.0
quire:wait_bucket{le="0.5",model_name="a b"} 1.0
quire:cache_config_info{block_size="16"} 1.0
process_cpu_seconds_total 7.5
"""


def test_figures_add_up_and_what_is_a_process_s_own_stays():
    other = OWN.replace(b" 3.0", b" 40.0").replace(b" 0.0", b" 2.0").replace(b" 7.5", b" 100.0")
    merged = merge_metrics(OWN, [other, other]).decode()
    assert merged == OWN.decode().replace(" 3.0", " 83.0").replace(" 0.0", " 4.0").replace('b"} 1.0', 'b"} 3.0')


def exposition(tenant: str, refused: float, restarts: float) -> bytes:
    return b"\n".join(
        (
            b"# TYPE q:refused_total counter",
            b'q:refused_total{tenant="%b"} %r' % (tenant.encode(), refused),
            b"# TYPE q:engine_restarts_total counter",
            b"q:engine_restarts_total %r" % restarts,
        )
    )


def test_what_only_another_process_has_is_added_and_what_all_count_alike_is_not():
    others = [exposition("c", 2.0, 3.0), exposition("c", 2.0, 2.0)]
    lines = merge_metrics(exposition("a b", 1.0, 1.0), others).splitlines()
    assert lines[1:3] == [b'q:refused_total{tenant="a b"} 1.0', b'q:refused_total{tenant="c"} 4.0']
    assert lines[4] == b"q:engine_restarts_total 3.0"


def test_what_one_process_alone_is_told_is_shown_by_all():
    adapters = b'quire:lora_requests_info{running_lora_adapters="a"} 5.0\n'
    theirs = b"# TYPE quire:lora_requests_info gauge\n" + adapters
    assert adapters in merge_metrics(b"quire:x 1.0\n", [theirs])


def test_only_those_that_answer_are_counted(tmp_path):
    asked = []

    async def answer(reader, writer):
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        writer.close()

    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\nno")
        writer.close()

    async def main():
        paths = [str(tmp_path / name) for name in ("good", "starting", "dead")]
        servers = [await asyncio.start_unix_server(answer, paths[0]), await asyncio.start_unix_server(refuse, paths[1])]
        assert await Siblings(paths, "key").ask("/load") == [b"hi"]
        assert b"GET /load?own=1 " in asked[0] and b"Authorization: Bearer key\r\n" in asked[0]
        for server in servers:
            server.close()

    asyncio.run(main())

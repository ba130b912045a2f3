"""The server under load: nothing is lost at 64 streams, nobody waits for others' clients"""
import asyncio, json, threading, time
import httpx, pytest
from sparkinfer.measure.http_load import free_engine, load_round, measure_load
from sparkinfer.serve.app import ServeSettings, background_server
from test_server_openai import build, slowly

@pytest.mark.parametrize('pace', [0.0, 0.01], ids=['free', 'paced'])
def test_64_streams_lose_nothing(pace):
    "What they cost is measured by `sparkinfer bench http`, not tested: the machine may be busy"
    ours, floor = measure_load(dict(sparkinfer=('sparkinfer', 'pass'), uvicorn=('uvicorn', 'pass')), streams=64, tokens=96, pace=pace, rounds=1)
    print(ours.row(), floor.row())
    assert ours.lost == 0 and floor.lost == 0

def test_one_wake_up_of_the_loop_for_a_step():
    "The fault: each stream woke the event loop by itself, 64 times a step"
    from sparkinfer.serve.running import Bell
    calls, rings, ring = [], [], Bell.ring
    class Counting(Bell):
        def ring(self, callback):
            rings.append(1)
            if not self.rung: calls.append(1)
            super().ring(callback)
    import sparkinfer.serve.app as app
    app.Bell, kept = Counting, app.Bell
    try:
        with background_server(lambda report: free_engine(32, 64, pace=0.01), ServeSettings(port=0, shutdown_seconds=0.2)) as state: assert load_round(state.url, 32, 64)['events'] == [64] * 32
    finally: app.Bell = kept
    assert len(rings) > 32 * 40 and len(calls) < len(rings) / 4, (len(calls), len(rings))

def test_a_long_body_does_not_stop_the_others():
    "Parsing and templates run beside the event loop: a stream goes on while 200 kB of messages are read"
    gaps = []
    with background_server(lambda report: build(script=lambda h: ord('a'), gate=slowly(0.005)), ServeSettings(port=0, shutdown_seconds=0.2)) as state:
        def read():
            with httpx.stream('POST', state.url + '/v1/completions', json=dict(prompt='x', max_tokens=300, stream=True), timeout=60) as r:
                last = time.perf_counter()
                for _ in r.iter_lines():
                    gaps.append(time.perf_counter() - last)
                    last = time.perf_counter()
        reader = threading.Thread(target=read); reader.start()
        while len(gaps) < 20: time.sleep(0.005)
        long = dict(messages=[dict(role='user', content='word ' * 8) for _ in range(5000)])
        for _ in range(3): assert httpx.post(state.url + '/v1/chat/completions', json=long, timeout=60).status_code == 400
        reader.join()
    assert sorted(gaps)[-3] < 1.0, sorted(gaps)[-5:]

def test_streams_end_even_when_many_clients_leave_at_once():
    with background_server(lambda report: free_engine(64, 2000, pace=0.005), ServeSettings(port=0, shutdown_seconds=0.2)) as state:
        async def some():
            async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None)) as client:
                async def one(k):
                    async with client.stream('POST', state.url + '/v1/chat/completions', json=dict(messages=[dict(role='user', content=f'{k}')], stream=True, max_tokens=2000, ignore_eos=True)) as r:
                        async for n, _ in asyncio_enumerate(r.aiter_lines()):
                            if n > k: return
                await asyncio.gather(*map(one, range(64)))
        async def asyncio_enumerate(lines):
            n = 0
            async for line in lines: n += 1; yield n, line
        asyncio.run(some())
        end = time.perf_counter() + 5
        while (h := state.engine.health()).active or h.queued: assert time.perf_counter() < end, h; time.sleep(0.01)
        assert h.cancelled == 64 and not state.engine.stats()['memory']['held_pages']

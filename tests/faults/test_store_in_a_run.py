"""A run whose S3 server turns it away, then is overloaded, hangs and loses replies: it stops in order, and resumes."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from app.driver import RunOutcome
from app.gc import collect
from app.job_spec import JobSpec
from app.verify import verify_run
from storage.catalog import Catalog
from storage.object_store import ObjectStore, open_object_store
from tests.helpers.runs import Runs, running, wait_for_step, wait_until
from tests.helpers.s3_proxy import S3Proxy, s3_proxy
from tests.helpers.s3_server import S3Server, ceph_installed, ceph_server, moto_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # start-ups of Ray take most of it

STEPS = 80
MAX_LAG = 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    """Ceph's gateway where it is installed."""
    with ceph_server(tmp_path / "ceph") if ceph_installed() else moto_server() as found:
        yield found


def spec_of(runs: Runs, proxy: S3Proxy, bucket: str) -> JobSpec:
    storage = proxy.server.options(bucket)
    s3 = {
        "endpoint": storage.s3.endpoint,
        "access_key": storage.s3.access_key.get_secret_value(),
        "secret_key": storage.s3.secret_key.get_secret_value(),
    }
    return runs.spec(
        "bad-days",
        storage={"url": storage.url, "s3": s3},
        training={"steps": STEPS},
        scaling={"workers": 1},
        checkpoint={"max_lag": MAX_LAG},
        failures={"store_outage_s": 4.0},
    )


def test_a_run_outlives_the_bad_days_of_its_store(runs: Runs, server: S3Server) -> None:
    with s3_proxy(server) as proxy:
        bucket = server.new_bucket()
        spec = spec_of(runs, proxy, bucket)
        store = open_object_store(server.options(bucket), spec.name)  # past the proxy

        with running(spec) as job:
            wait_for_step(store, 5, job)
            proxy.begin("denied")
        outcome = job.result()
        assert outcome.verdict is not None
        assert outcome.verdict.kind == "StoreError"
        assert "storage has failed for 4 s, so the run stops: " in outcome.verdict.message
        assert "access denied" in outcome.verdict.message
        assert proxy.fired["denied"] > 0
        stopped_at = Catalog(store).newest_record()
        assert 5 <= stopped_at.step < STEPS
        assert verify_run(store).problems == [], "the last restore point is not intact"

        proxy.end()
        patient = spec.model_copy(update={"failures": spec.failures.model_copy(update={"store_outage_s": 300.0})})
        with running(patient) as job:
            wait_for_step(store, stopped_at.step + 5, job)
            proxy.begin("busy")
            wait_until("many refusals", lambda: proxy.fired["busy"] > 60, future=job)
            proxy.begin("hang")
            wait_until("hanging requests", lambda: proxy.fired["hang"] > 2, future=job)
            time.sleep(5)
            assert not job.done()
            stuck_at = Catalog(store).newest_record().step
            proxy.end()
            wait_for_step(store, stuck_at + 5, job)
            proxy.begin("lost_reply", where="PUT", times=1)
            wait_until("lost replies", lambda: proxy.fired["lost_reply"] > 5, future=job)
            proxy.end()
        outcome = job.result()
        assert outcome.verdict is None, outcome.verdict
        check_whole(store)
    for secret in ("testsecret", spec.storage.s3.secret_key.get_secret_value()):
        assert told_secrets(secret, store, outcome) == []


def check_whole(store: ObjectStore) -> None:
    record = Catalog(store).newest_record()
    assert record.finished
    assert record.step == STEPS
    assert record.totals.held_seconds > 3, "training went on beyond max_lag"
    assert "store" in {incident.kind for incident in record.incidents}
    assert len(record.recoveries) == 1, record.recoveries  # the second submission
    assert verify_run(store).problems == []
    left = collect(store, dry_run=True)
    assert (left.keys, left.unfinished) == ((), ())


def told_secrets(secret: str, store: ObjectStore, outcome: RunOutcome) -> list[str]:
    """Where `secret` stands: in the catalog, in what Ray's session has logged, or in what the driver says."""
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    logs = [path for path in (session / "logs").rglob("*") if path.is_file()]
    assert logs
    needle = secret.encode()
    found = [str(path) for path in logs if needle in path.read_bytes()]
    found += [info.key for info in store.list("catalog/") if needle in store.read(info.key)]
    return found + [secret for said in (repr(outcome),) if secret in said]

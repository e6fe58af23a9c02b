import pytest
from tests.parity.test_parity import Case, VIRTUAL, UNEVEN, jobs, expected
from tests.parity.test_parity import _flags
import time


@pytest.mark.parametrize(
    "case",
    [
        Case("sp:2", "tp:2", 2, model="tied", micro=2),
        Case("dp:1@0", "dp:1@1", 2, micro=4),
        Case("sp:4", "pp:4", 4, model="deep", micro=4),
        Case("dp:1@0", "pp:2@1-2", 3, model="deep", flags=VIRTUAL),
        Case("pp:2,sp:2", "pp:2,tp:2", 4, model="deep-tied", flags=UNEVEN),
    ],
    ids=str,
)
def test_x(case, expected, pools, rules_pools):
    want = expected(case)
    for p in (pools, rules_pools):
        pool = p(case.ranks)
        pool.run(print)
        for i in range(2):
            t = time.time()
            out = pool.attempt(jobs.gradients, _flags(case, want.folder))
            print("TIME", str(case), p, time.time() - t)
        for o in out:
            if o.failure:
                print("FAIL", o.failure[-1500:])
            elif o.result:
                print("loss", o.result["loss"], want.loss, o.result["norm"])

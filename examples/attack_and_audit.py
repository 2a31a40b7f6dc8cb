"""Attack a federation as another party could, with and without privacy; then audit the private training.

python examples/attack_and_audit.py
"""

import tacit
from tacit.datasets import clinic
from tacit.settings import combine

hospitals = clinic("small", seed=7)
settings = combine(
    {"scorer": {"dim": 16}, "negatives": {"count": 16}, "training": {"batch": 64}},
    {"optimizer": {"learning_rate": 0.02}, "federation": {"rounds": 5}},
)

for recipe, more in (("fede", {}), ("private_fede", {"privacy": {"name": "dpsgd", "epsilon": 4.0}})):
    run = tacit.federate(hospitals, recipe, settings=combine(settings, more))
    found = tacit.attack(run, "cip", targets="canaries", count=300, victim=hospitals.names[0])
    for outcome in found.outcomes:
        for way in outcome.ways:
            print(f"{recipe}: {outcome.role}, {way}: canaries are told apart, AUC {outcome.last(way)[1].auc}")
    print(f"the strongest: {found}")

audited = tacit.audit(run, canaries=200, guesses=60)
print(f"claimed epsilon {audited.claimed:.2f}, measured at least {audited.lower_bound:.2f}: {audited.status}")

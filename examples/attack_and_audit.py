"""Attack a federation as another party could, with and without privacy; then audit the private training.

python examples/attack_and_audit.py
"""

import tacit
from tacit.attacks.attack import attack
from tacit.attacks.trial import Plot
from tacit.datasets import clinic
from tacit.privacy.onerun import audit_training
from tacit.settings import combine

hospitals = clinic("small", seed=7)
settings = combine(
    {"scorer": {"dim": 16}, "negatives": {"count": 16}, "training": {"batch": 64}},
    {"optimizer": {"learning_rate": 0.02}, "federation": {"rounds": 5}},
)
plot = Plot(victim=0, adversary=1, targets=300)

for recipe, more in (("fede", {}), ("private_fede", {"privacy": {"name": "dpsgd", "epsilon": 4.0}})):
    run = tacit.federate(hospitals, recipe, settings=combine(settings, more))
    for outcome in attack(run, ["cip"], ["canaries"], plot=plot):
        for way in outcome.ways:
            auc = outcome.last(way)[1].auc
            print(f"{recipe}: {way} tells canaries apart, AUC {auc.value:.2f} ({auc.low:.2f} to {auc.high:.2f})")

found = audit_training(run.settings, hospitals, recipe=run.recipe, federation=run.federation, canaries=200, guesses=60)
print(f"claimed epsilon {found.claimed}, measured at least {found.lower_bound:.2f}: {found.status}")

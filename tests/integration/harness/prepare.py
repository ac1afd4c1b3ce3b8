"""Preparation of what tests use for many runs: the installation, roots and driver files.

It runs before the tests, because it takes time and other work can go on meanwhile.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from harness import distributions, helm, machines, packages, prometheus, releases
from harness.driver import fetch_driver_files
from harness.installation import install
from harness.manifests import build_image


def main() -> None:
    """Make everything that is missing, two things at a time."""
    with ThreadPoolExecutor(2) as pool:
        others: list[Future[Any]] = [pool.submit(install), pool.submit(fetch_driver_files)]
        list(pool.map(releases.fetch_one, releases.NAMES))
        releases.fetch_apptainer()
        list(pool.map(distributions.fetch_one, distributions.DEBIANS))
        others += [pool.submit(machines.fetch, words) for words in machines.NEEDED]
        others.append(pool.submit(build_image))
        others.append(pool.submit(prometheus.fetch))
        others.append(pool.submit(packages.released))
        others.append(pool.submit(helm.fetch))
        for each in others:
            each.result()


if __name__ == "__main__":
    main()

"""The wheel carries conf/ inside the package; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["ml_pipeline*"]), "ml_pipeline.conf"],
    package_dir={"ml_pipeline.conf": "conf"},
    package_data={
        "ml_pipeline": ["py.typed", "worlds/*/conf/**/*.yaml"],
        "ml_pipeline.conf": ["**/*.yaml"],
    },
)

"""Which pages of the site are files of the repository outside docs/."""

PAGES = {
    "benchmarks.md": "benchmarks/README.md",
    "guides/movielens.md": "examples/movielens/README.md",
    "developers/changelog.md": "CHANGELOG.md",
    "developers/contributing.md": "CONTRIBUTING.md",
    "developers/report_vulnerability.md": "SECURITY.md",
    "developers/test_cluster.md": "cluster/README.md",
}
"""The page of the site, and the file."""

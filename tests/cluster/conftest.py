"""What every test against a cluster shares."""

from collections.abc import Iterator

import pytest

from cluster.server import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The API server of KUBECONFIG."""
    from kubernetes import client, config  # installed with the extra `operator`

    config.load_kube_config()  # type: ignore[no-untyped-call]
    with client.ApiClient() as api:
        yield Server(api)


@pytest.fixture(scope="session")
def served(server: Server) -> Server:
    """The same, with this checkout's definitions."""
    server.install_definitions()
    return server

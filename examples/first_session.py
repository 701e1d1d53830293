"""A first session, with nothing but the generated stubs: ask a model for tokens and print them as they come.

Needs a head, and a node that is up: `.venv/bin/python -m examples.first_session [HOST:PORT [MODEL]]`.
"""

import argparse
import sys

import grpc

from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1 import fleet_service_pb2_grpc as rpc


def first_session(address: str = "127.0.0.1:8455", model: str = "demo") -> None:
    with grpc.insecure_channel(address) as channel:
        fleet = rpc.FleetServiceStub(channel)
        prompt = pb.CreateSessionRequest(spec=pb.SessionSpec(model=model), token_ids=[1, 2, 3])
        session_id = fleet.CreateSession(prompt).session.session_id

        request = pb.GenerateRequest(session_id=session_id, spec=pb.GenerationSpec(max_new_tokens=16))
        for response in fleet.Generate(request):
            print(response.event)  # accepted, started, tokens ..., finished

        fleet.FinishSession(pb.FinishSessionRequest(session_id=session_id))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m examples.first_session")
    parser.add_argument("address", nargs="?", default="127.0.0.1:8455", metavar="HOST:PORT")
    parser.add_argument("model", nargs="?", default="demo")
    given = parser.parse_args()
    try:
        first_session(given.address, given.model)
    except grpc.RpcError as error:
        # What the head says of it: docs/errors.md shows how a program reads more than the text.
        sys.exit(f"{error.code().name}: {error.details()}")

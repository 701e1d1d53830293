"""A first session, with nothing but the generated stubs: ask a model for tokens and print them as they come.

Needs a head, and one of its nodes up: `python -m examples.first_session [HOST:PORT]`.
"""

import sys

import grpc

from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1 import fleet_service_pb2_grpc as rpc


def main(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        fleet = rpc.FleetServiceStub(channel)
        model = fleet.ListModels(pb.ListModelsRequest()).models[0].model.name

        prompt = pb.CreateSessionRequest(spec=pb.SessionSpec(model=model), token_ids=[1, 2, 3])
        session_id = fleet.CreateSession(prompt).session.session_id

        request = pb.GenerateRequest(session_id=session_id, spec=pb.GenerationSpec(max_new_tokens=16))
        for response in fleet.Generate(request):
            print(response.event)

        fleet.FinishSession(pb.FinishSessionRequest(session_id=session_id))


if __name__ == "__main__":
    main(*sys.argv[1:] or ["127.0.0.1:8455"])

"""`python -m fleet_service` is `fleet`."""

from fleet_service.cli import main

if __name__ == "__main__":
    main()

"""An M/M/4 at 80 % load in SimPy or ciw: sim-peers.py simpy|ciw REQUESTS prints `NAME 4 EVENTS CPU_SECONDS MEAN_MS`."""

import random
import sys
import time

RATE_PER_S, WORKERS, SERVICE_S = 3200.0, 4, 0.001


def with_simpy(requests):
    import simpy

    environment = simpy.Environment()
    workers = simpy.Resource(environment, WORKERS)
    times = []

    def request():
        arrived = environment.now
        with workers.request() as turn:
            yield turn
            yield environment.timeout(random.expovariate(1 / SERVICE_S))
        times.append(environment.now - arrived)

    def arrivals():
        for _ in range(requests):
            yield environment.timeout(random.expovariate(RATE_PER_S))
            environment.process(request())

    environment.process(arrivals())
    environment.run()
    return times


def with_ciw(requests):
    import ciw

    network = ciw.create_network(
        arrival_distributions=[ciw.dists.Exponential(rate=RATE_PER_S)],
        service_distributions=[ciw.dists.Exponential(rate=1 / SERVICE_S)],
        number_of_servers=[WORKERS],
    )
    simulation = ciw.Simulation(network)
    simulation.simulate_until_max_customers(requests)
    return [record.service_end_date - record.arrival_date for record in simulation.get_all_records()]


def main():
    name, requests = sys.argv[1], int(sys.argv[2])
    random.seed(1)
    simulate = {"simpy": with_simpy, "ciw": with_ciw}[name]
    begun = time.process_time()
    times = simulate(requests)
    took = time.process_time() - begun
    print(name, WORKERS, 2 * len(times), f"{took:.3f}", f"{sum(times) / len(times) * 1e3:.4f}")


main()

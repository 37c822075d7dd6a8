"""Stop every job of a Ray cluster and wait until each has ended: what a node does before it goes.

Each job gets SIGTERM, and SIGKILL after its own ``RAY_JOB_STOP_WAIT_TIME_S``.
"""

from __future__ import annotations

import argparse
import sys
import time

from ray.job_submission import JobStatus, JobSubmissionClient

ENDED = (JobStatus.STOPPED, JobStatus.SUCCEEDED, JobStatus.FAILED)


def stop_jobs(client: JobSubmissionClient, within_s: float) -> list[str]:
    """Stop them; returns the submission ids of those that have not ended ``within_s``."""
    deadline = time.monotonic() + within_s
    left = [
        job.submission_id  # None: a driver that was started by hand, nobody's to stop
        for job in client.list_jobs()
        if job.submission_id is not None and job.status not in ENDED
    ]
    for job in left:
        client.stop_job(job)
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        left = [job for job in left if client.get_job_status(job) not in ENDED]
    return left


def main() -> None:
    """Exit code 1 when a job is still there, or when the job server does not answer."""
    parser = argparse.ArgumentParser(description="Stop the jobs of a Ray cluster")
    parser.add_argument("--address", required=True, help="URL of the job server")
    parser.add_argument("--within-s", type=float, default=310)
    given = parser.parse_args()
    try:
        left = stop_jobs(JobSubmissionClient(given.address), given.within_s)
    except (ConnectionError, RuntimeError) as error:
        sys.exit(f"error: the job server at {given.address} does not answer: {error}")
    if left:
        sys.exit(f"error: still running after {given.within_s:.0f} s: {', '.join(left)}")


if __name__ == "__main__":
    main()

"""Looking back at runs: report.html and report.png."""

"""Reports on runs: report.html, report.png, status and verification."""

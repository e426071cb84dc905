"""Uploading an export to the Hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt2_ddp.errors import UserError


class Hub:
    """A repository for models on the Hub, by whoever is logged in there.

    Args:
        repository: OWNER/NAME; it is made when something is uploaded.
        private: whether it is made for its owner's eyes alone.

    Raises:
        UserError: nobody is logged in, or the Hub is not reached.
    """

    def __init__(self, repository: str, private: bool):
        from huggingface_hub import HfApi

        self.repository, self.private, self._api = repository, private, HfApi()
        with self._told("log in with `hf auth login`, or leave it away"):
            self._api.whoami()

    def upload(self, folder: Path) -> str:
        """Uploads a folder in one commit; returns the repository's address. Raises: UserError where the Hub refuses."""
        with self._told(f"the export is whole; `hf upload {self.repository} {folder}` uploads it later"):
            url = self._api.create_repo(self.repository, private=self.private, exist_ok=True)
            message = "Export of gpt2_ddp"
            self._api.upload_folder(repo_id=self.repository, folder_path=folder, commit_message=message)
        return str(url)

    @contextmanager
    def _told(self, hint: str) -> Iterator[None]:
        from huggingface_hub.errors import HFValidationError, HTTPError  # pyright: ignore[reportPrivateImportUsage]

        try:
            yield
        except (OSError, HTTPError, HFValidationError) as error:
            reason = str(error).strip().split("\n")[0]
            raise UserError("push_to_hub", self.repository, f"{reason}; {hint}") from error

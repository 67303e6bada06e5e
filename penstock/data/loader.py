"""The batches of a run by the number of the step: of data that is packed once, of a stream, or a program's own."""

from .given import Given
from .sampling import MapStyleData, Stream

Loader = MapStyleData | Stream | Given

// The search's own syntax takes a leading - for "without" and + for "with", so that options such as
// --gpus found nothing. Words lose such signs before the query reaches the theme's worker.
const QUERY = 2; // the theme's SearchMessageType
const plainQuery = (text) => text.replace(/(^|\s)[-+]+(?=\S)/g, "$1");
if (typeof Worker !== "undefined") {
  const post = Worker.prototype.postMessage;
  Worker.prototype.postMessage = function (message, ...rest) {
    if (message && message.type === QUERY && typeof message.data === "string") {
      message = { ...message, data: plainQuery(message.data) };
    }
    return post.call(this, message, ...rest);
  };
}
